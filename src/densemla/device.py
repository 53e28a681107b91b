"""Which devices torch can use here, and whether its build holds code for a GPU.

The rule for the latter is CUDA's own ("Application Compatibility" and "Family-specific features" in NVIDIA's CUDA
programming guide and PTX manual):

* a cubin ``sm_XY`` runs on capabilities of the same major with minor >= Y;
* PTX ``compute_XY`` is compiled by the driver for any capability >= X.Y;
* a suffix ``a`` (architecture-specific, as ``sm_90a``) runs on exactly that capability, PTX too;
* a suffix ``f`` (family-specific, as ``sm_100f``) runs on the same major with minor >= Y, PTX too;
* nothing else crosses majors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from .errors import ContractError

RULE = (
    "sm_XY runs on major X with minor >= Y, compute_XY (PTX) on any capability >= X.Y, suffix 'a' on exactly "
    "that capability, suffix 'f' on major X with minor >= Y"
)

# The last digit is the minor: sm_90 is 9.0, sm_121 is 12.1.
_ENTRY = re.compile(r"(sm|compute)_(\d{1,2})(\d)([af]?)", re.ASCII)


@dataclass(frozen=True, slots=True)
class ArchCheck:
    """Whether a list of architectures holds code for a device; true in a condition when it does.

    Attributes:
        ok: there is code that runs.
        entry: the first entry of the list that runs, or None.
        message: names the device, its capability, the list and the rule.
    """

    ok: bool
    entry: str | None
    message: str

    def __bool__(self) -> bool:
        return self.ok


def check_arch(capability: tuple[int, int], arch_list: Sequence[str], *, device: str = "device") -> ArchCheck:
    """Apply CUDA's compatibility rule (see the module) to a device and a build.

    Args:
        capability: ``(major, minor)``, as ``torch.cuda.get_device_capability()`` gives it.
        arch_list: what the build holds, as ``torch.cuda.get_arch_list()`` gives it: ``sm_XY`` and
            ``compute_XY``, each with an optional suffix ``a`` or ``f``.
        device: what the message calls the device.

    Raises:
        ContractError: ``capability`` is no pair of ints, or an entry of ``arch_list`` can't be read.
    """
    major, minor = _capability(capability)
    listed = isinstance(arch_list, Sequence) and not isinstance(arch_list, str)
    if not listed or not all(isinstance(entry, str) for entry in arch_list):
        raise ContractError("arch_list", "a sequence of names such as 'sm_90'", repr(arch_list))
    running = [entry for entry in arch_list if _runs(entry, major, minor)]
    entry = running[0] if running else None
    holds = ", ".join(arch_list) if arch_list else "nothing"
    found = f"{entry} runs on it" if entry else "none of it runs there"
    message = f"{device} has compute capability {major}.{minor} and the build holds {holds}: {found} ({RULE})"
    return ArchCheck(entry is not None, entry, message)


def _capability(value: object) -> tuple[int, int]:
    if (
        isinstance(value, tuple)
        and len(value) == 2
        and all(isinstance(part, int) and not isinstance(part, bool) and part >= 0 for part in value)
    ):
        return value
    raise ContractError("capability", "a pair (major, minor) of ints", repr(value))


def _runs(entry: str, major: int, minor: int) -> bool:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise ContractError("arch_list", "entries such as 'sm_90', 'sm_90a', 'sm_100f' or 'compute_90'", repr(entry))
    kind, suffix = match[1], match[4]
    built = (int(match[2]), int(match[3]))
    if suffix == "a":
        return built == (major, minor)
    if kind == "compute" and not suffix:
        return built <= (major, minor)
    return built[0] == major and built[1] <= minor


def why_no_cuda() -> str | None:
    """Why torch can use no CUDA device here, and what to do; None when it can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; a GPU needs a build of torch for CUDA"
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} is built for CUDA {torch.version.cuda} but finds no usable GPU; "
            "see whether nvidia-smi lists one, its driver is new enough, and CUDA_VISIBLE_DEVICES does not hide it"
        )
    return None


def usable(name: str | torch.device) -> torch.device:
    """The device called ``name``, if torch can use it here.

    Raises:
        ContractError: it is no CPU or CUDA device, or is not here; the message says why.
    """
    # torch would take an int too, for whatever accelerator it finds.
    if not isinstance(name, (str, torch.device)):
        raise ContractError("device", "cpu, cuda or cuda:N", repr(name))
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ContractError("device", "cpu, cuda or cuda:N", repr(name)) from error
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ContractError("device", "cpu, cuda or cuda:N", repr(name))
    if (why := why_no_cuda()) is not None:
        raise ContractError("device", "cpu", f"{name!r}: {why}")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ContractError("device", f"cuda:0 to cuda:{torch.cuda.device_count() - 1}", repr(name))
    return device


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one inside a ``with``; nothing for the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
