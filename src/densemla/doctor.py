"""What can run here, and why not: the findings behind ``densemla doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from .backends import backend_names, load
from .backends.cpu import native
from .caps import Caps
from .device import check_arch, why_no_cuda
from .errors import ContractError
from .options import PARTIAL_DTYPE_ENV, SINGLE_SPLIT_CHUNKS_ENV, SplitOptions
from .presets import PRESETS
from .vllm import status


class State(StrEnum):
    OK = "ok"
    NOTE = "-"
    """Not to be had here, and nothing is wrong with that."""
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at, its state, and what to know or do about it."""

    subject: str
    state: State
    text: str


def examine() -> list[Finding]:
    """Look at torch, the devices, the backends on each device, and the options in the environment."""
    findings = [_torch(), _cpu()]
    devices = [torch.device("cpu")]
    if why_no_cuda() is None:
        arch_list = torch.cuda.get_arch_list()
        kinds = set()
        for index in range(torch.cuda.device_count()):
            findings.append(_gpu(index, arch_list))
            name = torch.cuda.get_device_name(index)
            if name not in kinds:
                kinds.add(name)
                devices.append(torch.device("cuda", index))
    on_backends = [_backend(name, device) for name in backend_names() for device in devices]
    findings += on_backends
    if not any(finding.state is State.OK for finding in on_backends):
        findings.append(Finding("backends", State.PROBLEM, "none can run here"))
    findings += [_environment(), _vllm()]
    return findings


def _torch() -> Finding:
    why = why_no_cuda()
    if why is None:
        return Finding("torch", State.OK, f"{torch.__version__}, CUDA {torch.version.cuda}")
    return Finding("torch", State.NOTE, why)


def _cpu() -> Finding:
    capability = torch.backends.cpu.get_cpu_capability()
    isa = native.available()
    if isa is None:
        compiled = "the decode was not compiled and runs in torch, slower: install again with a C compiler"
    else:
        compiled = f"the compiled decode {isa}"
    state = State.NOTE if isa is None else State.OK
    return Finding("cpu", state, f"{torch.get_num_threads()} threads, torch uses {capability}, {compiled}")


def _gpu(index: int, arch_list: list[str]) -> Finding:
    properties = torch.cuda.get_device_properties(index)
    name = f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB)"
    support = check_arch((properties.major, properties.minor), arch_list, device=name)
    if support:
        return Finding(f"cuda:{index}", State.OK, support.message)
    return Finding(f"cuda:{index}", State.PROBLEM, f"{support.message}. Install a build of torch for this GPU.")


def _backend(name: str, device: torch.device) -> Finding:
    subject = f"backend {name} on {device}"
    try:
        why = load(name).refusal(_caps(device))
    except ImportError as error:
        why = f"it can't be imported: {error}"
    return Finding(subject, State.OK, "can run") if why is None else Finding(subject, State.NOTE, why)


def _caps(device: torch.device) -> Caps:
    # Explicit options, so that a bad environment is one finding of its own.
    options = SplitOptions()
    return Caps(
        device=device,
        num_q_heads=PRESETS["kimi-k3"].num_q_heads,
        partial_dtype=options.partial_dtype,
        single_split_chunks=options.single_split_chunks,
    )


def _environment() -> Finding:
    try:
        options = SplitOptions.from_env()
    except ContractError as error:
        return Finding("environment", State.PROBLEM, str(error))
    return Finding(
        "environment",
        State.OK,
        f"{PARTIAL_DTYPE_ENV} and {SINGLE_SPLIT_CHUNKS_ENV} give partials in "
        f"{options.partial_dtype} and threshold {options.single_split_chunks}",
    )


def _vllm() -> Finding:
    plugin = status()
    if not plugin.installed:
        return Finding("vLLM plugin", State.NOTE, plugin.detail)
    return Finding("vLLM plugin", State.OK if plugin.active else State.PROBLEM, plugin.detail)
