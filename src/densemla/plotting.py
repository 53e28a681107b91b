"""The picture of a study."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .errors import ContractError
from .study import ONE_SPLIT, Study, StudyRow

# matplotlib writes more, some of them badly (no transparency in .eps) or only with other software (.pgf).
_SUFFIXES = (".png", ".svg", ".pdf")
_COLOURS = {"bf16": "#c4512d", "fp32": "#2b6ca3", None: "#333333"}
_STYLES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D")


def check_suffix(path: Path) -> None:
    """Raise :class:`ContractError` unless ``path`` ends in .png, .svg or .pdf."""
    if path.suffix.lower() not in _SUFFIXES:
        raise ContractError("plot", "a file name that ends in one of " + ", ".join(_SUFFIXES), repr(path.name))


def plot_study(study: Study, path: Path) -> None:
    """Write error (one panel for each kind of logits) and time against context length to ``path``.

    Raises:
        ContractError: ``path`` does not end in .png, .svg or .pdf.
    """
    check_suffix(path)
    kinds = list(study.config.logits)
    figure = Figure(figsize=(4.1 * (len(kinds) + 1), 4.2), layout="constrained")
    panels = figure.subplots(1, len(kinds) + 1)
    for panel, logits in zip(panels, kinds, strict=False):
        _curves(panel, study, logits, lambda row: row.error * 1e3)
        panel.set_title(f"{logits} logits", fontsize=10)
        panel.sharey(panels[0])
    panels[0].set_ylabel("error against float64, 10⁻³")
    panels[0].set_ylim(bottom=0)
    _curves(panels[-1], study, kinds[-1], lambda row: row.time_us / 1e3)
    panels[-1].set_title(f"time on {study.config.device}", fontsize=10)
    panels[-1].set_ylabel("ms")
    panels[-1].set_yscale("log")
    panels[-1].yaxis.set_major_formatter("{x:g}")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5), frameon=False, fontsize=9)
    figure.suptitle(f"{study.config.preset.name}, {study.config.preset.num_q_heads} heads, {study.num_splits} splits")
    figure.savefig(path, dpi=110)


def _curves(panel: Axes, study: Study, logits: str, value: Callable[[StudyRow], float]) -> None:
    """One line for each option; the one-split run in grey beneath them."""
    thresholds = list(study.config.thresholds)
    for name, threshold in _options(study):
        rows = [
            row for row in study.rows if (row.logits, row.partial_dtype, row.threshold) == (logits, name, threshold)
        ]
        which = 0 if threshold == ONE_SPLIT else thresholds.index(int(threshold))
        panel.plot(
            [row.tokens for row in rows],
            [value(row) for row in rows],
            color=_COLOURS[name],
            linestyle=_STYLES[which % len(_STYLES)],
            marker=_MARKERS[which % len(_MARKERS)],
            markersize=4,
            linewidth=5 if name is None else 1.6,
            alpha=0.25 if name is None else 1.0,
            label=_label(study, name, threshold),
        )
    panel.set_xscale("log", base=2)
    ticks = sorted(study.config.tokens)
    panel.set_xticks(ticks, [f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens) for tokens in ticks])
    panel.minorticks_off()
    panel.set_xlabel("context, tokens")
    panel.grid(alpha=0.25)


def _options(study: Study) -> list[tuple[str | None, int | str]]:
    return list(dict.fromkeys((row.partial_dtype, row.threshold) for row in study.rows))


def _label(study: Study, name: str | None, threshold: int | str) -> str:
    if name is None:
        return "one split"
    if threshold == 0:
        return f"{name} partials, always split"
    limit = study.default_threshold if threshold == -1 else int(threshold)
    return f"{name} partials, split above {limit} chunks"
