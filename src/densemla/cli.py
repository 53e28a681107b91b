"""The command line: ``densemla COMMAND``. Each command only parses, calls and prints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text
from typer.core import TyperGroup

from . import __version__, captured, presets, reporting
from .backends import load
from .checks import check_result_file
from .device import current, usable
from .distributed.check import dcp_check
from .doctor import State, examine
from .dspark.cli import app as dspark_app
from .errors import USER_ERROR, ContractError
from .inputs import LOGITS
from .options import PARTIAL_DTYPES, SplitOptions
from .study import DEFAULT_THRESHOLDS, DEFAULT_TOKENS, StudyConfig
from .study import study as run_study


class _Group(TyperGroup):
    """Turns what a user can put right into one line and status 2, for every command mounted below."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ContractError as error:
            message = str(error)
        except BrokenPipeError:
            # Whoever read the output has had enough (head); Click ends quietly.
            raise
        except OSError as error:
            message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        Console(stderr=True).print(Text.assemble(("error:", "bold red"), f" {message}"), soft_wrap=True)
        raise typer.Exit(USER_ERROR)


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Dense MLA decode over a paged latent cache, with the split precision as your choice.",
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KV_DTYPES: dict[str, torch.dtype | str] = {**DTYPES, "fp8": torch.float8_e4m3fn, "fp8_ds_mla": "fp8_ds_mla"}


def _tokens(option: str, text: str) -> list[int]:
    """Context lengths such as ``1000,4k,1m``; k is 1024 tokens."""
    lengths = []
    for part in text.split(","):
        digits, factor = part.strip().lower(), 1
        if digits[-1:] in ("k", "m"):
            factor = 1024 if digits[-1] == "k" else 1024**2
            digits = digits[:-1]
        # Python refuses to read thousands of digits.
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 18):
            raise ContractError(option, "numbers with commas between them, such as 1000,4k,1m", repr(text))
        lengths.append(int(digits) * factor)
    return list(dict.fromkeys(lengths))


def _named(option: str, names: dict[str, Any], name: str) -> Any:
    if name not in names:
        raise ContractError(option, "one of " + ", ".join(names), repr(name))
    return names[name]


def _capacity(text: str) -> int:
    lengths = _tokens("capacity", text)
    if len(lengths) != 1:
        raise ContractError("capacity", "one length, such as 128k", repr(text))
    return lengths[0]


def _options(partial_dtype: str | None, single_split_chunks: int | None, backend: str) -> SplitOptions | None:
    """The environment's options, each replaced by the argument where there is one; None if the backend has none."""
    if backend != "auto" and "partial_dtype" not in load(backend).features:
        for name, value in (("partial_dtype", partial_dtype), ("single_split_chunks", single_split_chunks)):
            if value is not None:
                raise ContractError(name, f"none with backend {backend}, which does not split", value)
        return None
    options = SplitOptions.from_env()
    if partial_dtype is not None:
        options = replace(options, partial_dtype=_named("partial_dtype", PARTIAL_DTYPES, partial_dtype))
    if single_split_chunks is not None:
        options = replace(options, single_split_chunks=single_split_chunks)
    return options


def _decode(input_file: Path, options: SplitOptions | None, backend: str, device: str) -> captured.Result:
    with current(usable(device)):
        output, lse = captured.load_step(input_file).to(device).decode(options, backend)
    metadata = {
        "densemla": __version__,
        "torch": torch.__version__,
        "device": device,
        "backend": backend,
        "input_sha256": captured.sha256(input_file),
    }
    if options is not None:
        metadata["partial_dtype"] = next(
            name for name, dtype in PARTIAL_DTYPES.items() if dtype is options.partial_dtype
        )
        metadata["single_split_chunks"] = str(options.single_split_chunks)
    return captured.Result(output=output.cpu(), lse=lse.cpu(), metadata=metadata)


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command("presets")
def presets_command() -> None:
    """List the attention shapes that `study` knows."""
    Console().print(reporting.presets_table())


@app.command()
def study(
    *,
    preset: Annotated[str, typer.Option(help="A shape from `densemla presets`.")] = "kimi-k3",
    tokens: Annotated[str, typer.Option(help="Context lengths, such as 1000,4k,1m.")] = ",".join(
        f"{tokens // 1024}k" for tokens in DEFAULT_TOKENS
    ),
    capacity: Annotated[str, typer.Option(help="Longest request the plan admits; it fixes the splits.")] = "128k",
    single_split_chunks: Annotated[
        list[int], typer.Option(help="Thresholds to compare (repeat): -1 the plan's own, 0 always split, N chunks.")
    ] = list(DEFAULT_THRESHOLDS),  # noqa: B006
    logits: Annotated[list[str], typer.Option(help="How inputs are drawn (repeat): uniform, heavy.")] = list(LOGITS),  # noqa: B006
    dtype: Annotated[str, typer.Option(help="Queries and output: " + ", ".join(DTYPES) + ".")] = "bf16",
    kv_dtype: Annotated[str, typer.Option(help="Cache: " + ", ".join(KV_DTYPES) + ".")] = "bf16",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    backend: Annotated[str, typer.Option(help="auto, or a backend from `densemla doctor`.")] = "auto",
    repeat: Annotated[int, typer.Option(min=1, help="Fewest timed runs of each option; the median counts.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every number to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw error and time to this file (.png, .svg, .pdf).")] = None,
) -> None:
    """Decode under each precision option and show what it costs, against float64."""
    config = StudyConfig(
        preset=presets.preset(preset),
        tokens=_tokens("tokens", tokens),
        capacity=_capacity(capacity),
        thresholds=list(dict.fromkeys(single_split_chunks)),
        logits=list(dict.fromkeys(logits)),
        q_dtype=_named("dtype", DTYPES, dtype),
        kv_dtype=_named("kv_dtype", KV_DTYPES, kv_dtype),
        device=device,
        backend=backend,
        repeat=repeat,
        seed=seed,
    )
    if plot is not None:
        # matplotlib takes long to load, and only this needs it.
        from . import plotting  # noqa: PLC0415

        plotting.check_suffix(plot)
    for path in (json_file, plot):
        check_result_file(path)
    if json_file is not None and plot is not None and json_file.resolve() == plot.resolve():
        raise ContractError("plot", "another file than --json", plot)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=config.steps)
        done = -1

        def on_step(what: str) -> None:
            nonlocal done
            done += 1
            progress.update(task, completed=done, description=what)

        result = run_study(config, on_step)
    console = Console()
    console.print(reporting.study_header(result), highlight=False, markup=False)
    for table in reporting.study_tables(result):
        console.print()
        console.print(table)
    for line in reporting.study_summary(result):
        console.print(line, highlight=False)
    if json_file is not None:
        json_file.write_text(json.dumps(reporting.study_json(result, __version__), indent=1) + "\n")
    if plot is not None:
        plotting.plot_study(result, plot)


@app.command()
def doctor() -> None:
    """Show what can run here and why not (exit status 1 on a problem)."""
    findings = examine()
    Console().print(reporting.doctor_table(findings))
    if any(finding.state is State.PROBLEM for finding in findings):
        raise typer.Exit(1)


InputFile = Annotated[Path, typer.Argument(metavar="INPUT", help="A captured step (.safetensors).")]
PartialDtype = Annotated[str | None, typer.Option(help="bf16 or fp32; by default what the environment says.")]
SingleSplitChunks = Annotated[int | None, typer.Option(help="-1, 0 or N; by default what the environment says.")]
Backend = Annotated[str, typer.Option(help="auto, or a backend from `densemla doctor`.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")]


@app.command()
def decode(
    *,
    input_file: InputFile,
    output_file: Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help="File for output and lse.")],
    partial_dtype: PartialDtype = None,
    single_split_chunks: SingleSplitChunks = None,
    backend: Backend = "auto",
    device: Device = "cpu",
) -> None:
    """Run one captured decode step.

    INPUT holds q, kv_cache, page_table and cache_seqlens, and where they apply
    cu_seqlens_q, query_cache_seqlens, q_scale and kv_scale. Its metadata holds
    sm_scale, and kv_lora_rank where that is not 512. OUT gets output and lse
    (natural log).
    """
    check_result_file(output_file)
    captured.check_target(output_file)
    if output_file.exists() and input_file.exists() and output_file.samefile(input_file):
        raise ContractError("output", "another file than INPUT", output_file)
    result = _decode(input_file, _options(partial_dtype, single_split_chunks, backend), backend, device)
    captured.save_result(output_file, result)
    Console().print(reporting.decoded(result, output_file), highlight=False, markup=False, soft_wrap=True)


@app.command()
def check(
    *,
    input_file: InputFile,
    against: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Result to judge; without it the step is decoded here.")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest relative error of a head; by default what the types allow.")
    ] = None,
    partial_dtype: PartialDtype = None,
    single_split_chunks: SingleSplitChunks = None,
    backend: Backend = "auto",
    device: Device = "cpu",
) -> None:
    """Compare a captured step's result with float64 and say which rows are off (exit status 1)."""
    step = captured.load_step(input_file)
    if against is None:
        result = _decode(input_file, _options(partial_dtype, single_split_chunks, backend), backend, device)
    elif (partial_dtype, single_split_chunks, backend, device) != (None, None, "auto", "cpu"):
        raise ContractError("against", "no decode options beside it: the result is already there", "some")
    else:
        result = captured.load_result(against, input_file)
    checks = captured.check(step, result, tolerance)
    console = Console()
    console.print(reporting.check_summary(checks, result, tolerance), highlight=False, markup=False)
    if any(query.heads_off for query in checks):
        console.print(reporting.check_table(checks, step))
        raise typer.Exit(1)


app.command("dcp-check")(dcp_check)
app.add_typer(dspark_app, name="dspark")


if __name__ == "__main__":
    app()
