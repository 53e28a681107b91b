"""Making vLLM know densemla, and saying whether it does."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from dataclasses import dataclass

PLUGIN_GROUP = "vllm.general_plugins"

PLUGIN_NAME = "densemla"

BACKEND_NAME = "DENSEMLA"
"""Name of the GPU backend, for vLLM's ``--attention-backend``."""

SUPPORTED_VLLM = ">=0.32,<0.33"
"""vLLM's attention interfaces change with every minor release; these are the ones this plugin is written to."""

_SUPPORTED_MINORS = ((0, 32),)

_WITHOUT = "or keep vLLM from loading this plugin: VLLM_PLUGINS= (or a list without densemla)"


@dataclass(frozen=True, slots=True)
class PluginStatus:
    """Whether vLLM in this environment decodes with densemla.

    Attributes:
        installed: vLLM is installed here.
        active: a vLLM started here, with these environment variables, loads the plugin.
        detail: the same in a sentence, with what to do when it is not active.
    """

    installed: bool
    active: bool
    detail: str


def refusal(version: str) -> str | None:
    """Why vLLM ``version`` is not supported; None when it is."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match and (int(match[1]), int(match[2])) in _SUPPORTED_MINORS:
        return None
    return f"densemla supports vLLM {SUPPORTED_VLLM}, and this is {version}"


def register() -> None:
    """Entry point: register densemla's decode backends with the vLLM of this process.

    Harmless when called twice.

    Raises:
        ImportError: this vLLM is outside :data:`SUPPORTED_VLLM`.
    """
    import vllm  # type: ignore[import-not-found]  # noqa: PLC0415  (optional)

    if (why := refusal(vllm.__version__)) is not None:
        raise ImportError(f"{why}. Install a vLLM in that range, {_WITHOUT}.")
    from vllm.v1.attention.backends.registry import (  # type: ignore[import-not-found]  # noqa: PLC0415
        AttentionBackendEnum,
        register_backend,
    )

    # The CPU platform knows no other name than CPU_MLA: anything else falls back to it silently.
    register_backend(AttentionBackendEnum.CPU_MLA, "densemla.vllm.cpu.DenseMLACPUBackend")
    if BACKEND_NAME not in AttentionBackendEnum.__members__:
        register_backend(BACKEND_NAME, "densemla.vllm.gpu.DenseMLABackend")


def status() -> PluginStatus:
    """Look at this environment without importing vLLM."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return PluginStatus(False, False, "vLLM is not installed in this environment")
    names = importlib.metadata.packages_distributions().get("vllm")
    if not names:
        return PluginStatus(True, False, "vLLM is importable but not installed as a package: its version is unknown")
    version = importlib.metadata.version(names[0])
    if (why := refusal(version)) is not None:
        return PluginStatus(True, False, f"{why}: vLLM will not start with this plugin; {_WITHOUT}")
    if not importlib.metadata.entry_points(group=PLUGIN_GROUP, name=PLUGIN_NAME):
        return PluginStatus(
            True, False, f"vLLM {version} is installed, but densemla's entry point is not: install densemla with pip"
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        return PluginStatus(True, False, f"vLLM {version} will not load densemla: VLLM_PLUGINS={allowed} leaves it out")
    return PluginStatus(
        True,
        True,
        f"vLLM {version} loads densemla: it replaces CPU_MLA on the CPU platform, "
        f"and is --attention-backend {BACKEND_NAME} on a GPU",
    )
