"""Reading draft checkpoints: only the tensors that are needed, only from inside the folder.

A draft's folder holds ``config.json`` and its weights; the embedding and the LM head are the target's, and
of the target's checkpoint nothing else is read. Every message says which file or tensor is at fault and
what to do about it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..device import usable
from ..errors import ContractError
from .config import DSparkConfig, draft_config
from .model import DSparkDraft

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CONFIG_FILE = "config.json"

EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "embed_tokens.weight",
)
LM_HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")

_NOT_OURS = ("embed_tokens.", "lm_head.", "confidence_head.")
"""Tensors of a draft's folder that serving does not use: a copy of the target's, and a training aid."""

_SAMPLE_BYTES = 4096

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class CheckpointError(ValueError):
    """A checkpoint can't be used; the message names the file or tensor and what to do."""


def inside(folder: Path, name: str, where: str) -> Path:
    """The file ``name`` of a checkpoint, which must lie in its folder, symbolic links followed.

    Raises:
        CheckpointError: the name is absolute or leads out of the folder, or the file is missing.
    """
    path = folder / name
    if Path(name).is_absolute() or not path.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(
            f"{where} names {name!r}, which lies outside {folder}: refused. If this is a download cache whose "
            "files are links into another folder, copy the checkpoint into a plain folder (cp -L) and use that"
        )
    if not path.is_file():
        raise CheckpointError(f"{path} is missing ({where} names it): download the checkpoint again")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read as JSON ({error}): download the checkpoint again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object: download the checkpoint again")
    return value


@dataclass(frozen=True, slots=True)
class Weights:
    """Where a folder's tensors are: name to file, nothing opened yet."""

    folder: Path
    files: Mapping[str, Path]

    @classmethod
    def open(cls, folder: Path) -> Weights:
        """Read ``model.safetensors.index.json``, or the header of a lone ``model.safetensors``."""
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is no folder: give the folder that holds {CONFIG_FILE}")
        if (folder / INDEX_FILE).exists():
            index = inside(folder, INDEX_FILE, "the checkpoint")
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
                raise CheckpointError(f"{index} has no 'weight_map' of file names: download the checkpoint again")
            paths = {name: inside(folder, name, str(index)) for name in set(weight_map.values())}
            return cls(folder, {tensor: paths[name] for tensor, name in weight_map.items()})
        if (folder / SINGLE_FILE).exists():
            single = inside(folder, SINGLE_FILE, "the checkpoint")
            return cls(folder, dict.fromkeys(_header(single), single))
        raise CheckpointError(f"{folder} holds neither {INDEX_FILE} nor {SINGLE_FILE}: is it a checkpoint folder?")

    def first_of(self, names: Iterable[str], what: str) -> str:
        """The first of ``names`` that this checkpoint has."""
        candidates = list(names)
        for name in candidates:
            if name in self.files:
                return name
        raise CheckpointError(f"{self.folder} has no tensor for {what}: looked for {', '.join(candidates)}")

    def load(self, wanted: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
        """The tensors named in ``wanted``, which must have these shapes; no other is read.

        A first dimension may be larger in the file (a vocabulary padded for alignment) when ``wanted``
        gives it negative; the rows past it are left on disk.
        """
        out: dict[str, torch.Tensor] = {}
        for path, names in _by_file(self, wanted).items():
            try:
                with safe_open(path, framework="pt", device=device) as file:
                    present = set(file.keys())
                    for name in names:
                        if name not in present:
                            raise CheckpointError(f"{path} lacks the tensor {name} that the index promises")
                        out[name] = _cut(file.get_slice(name), wanted[name], f"{path}: tensor {name}").to(dtype)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is damaged ({error}): download this file again") from error
        return out


def _by_file(weights: Weights, names: Iterable[str]) -> dict[Path, list[str]]:
    files: dict[Path, list[str]] = {}
    for name in names:
        if name not in weights.files:
            raise CheckpointError(f"{weights.folder} lacks the tensor {name}: is it the right checkpoint?")
        files.setdefault(weights.files[name], []).append(name)
    return files


def _cut(stored: Any, shape: tuple[int, ...], where: str) -> torch.Tensor:
    rows, rest = abs(shape[0]), list(shape[1:])
    actual = stored.get_shape()
    fits = actual[0] >= rows if shape[0] < 0 else actual[0] == rows
    if len(actual) != len(shape) or not fits or actual[1:] != rest:
        at_least = "at least " if shape[0] < 0 else ""
        raise CheckpointError(
            f"{where} has shape {actual}, expected {at_least}{[rows, *rest]}: does {CONFIG_FILE} fit these weights?"
        )
    tensor: torch.Tensor = stored[:rows]
    if tensor.dtype not in _FLOATS:
        raise CheckpointError(f"{where} is {tensor.dtype}: only bf16, float16 and float32 weights are supported")
    return tensor


def _header(path: Path) -> dict[str, Any]:
    """A safetensors header: tensor name to dtype, shape and ``data_offsets``; ``__metadata__`` left out."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > path.stat().st_size:
                raise ValueError(f"a header of {size} bytes in a file of {path.stat().st_size}")
            header = json.loads(file.read(size))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): download this file again") from error
    header.pop("__metadata__", None)
    return dict(header)


def load_config(folder: Path) -> DSparkConfig:
    """The draft's sizes from its ``config.json``."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder: give the folder that holds {CONFIG_FILE}")
    path = inside(folder, CONFIG_FILE, "the checkpoint")
    try:
        return draft_config(read_json(path))
    except ContractError as error:
        raise CheckpointError(f"{path}: {error}") from error


def load_draft(draft: Path, target: Path, *, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> DSparkDraft:
    """A draft with its target's embedding and LM head.

    Args:
        draft: folder of the draft's checkpoint.
        target: folder of the target's; only its index, embedding and LM head are read. The draft's own
            folder will do when it holds both tensors.
        dtype: what the weights become.
        device: where they go.

    Raises:
        CheckpointError: a file or tensor is missing, damaged, of another shape, or outside its folder.
        ContractError: torch can't use ``device`` here.
    """
    usable(device)
    config = load_config(draft)
    with torch.device("meta"):
        model = DSparkDraft(config)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.own_state_dict().items()}
    weights = Weights.open(draft)
    unknown = [name for name in weights.files if name not in wanted and not name.startswith(_NOT_OURS)]
    if unknown:
        raise CheckpointError(f"{draft} holds tensors of another model, such as {unknown[0]}: not a DSpark MLA draft")
    state = weights.load(wanted, dtype, device)
    shared = Weights.open(target)
    embedding = shared.first_of(EMBEDDING_NAMES, "the embedding")
    # Targets with tied embeddings ship the one tensor.
    head = shared.first_of((*LM_HEAD_NAMES, embedding), "the LM head")
    shape = (-config.vocab_size, config.hidden_size)
    tensors = shared.load({embedding: shape, head: shape}, dtype, device)
    state["embed_tokens.weight"], state["lm_head.weight"] = tensors[embedding], tensors[head]
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False)


def save_draft(model: DSparkDraft, folder: Path) -> None:
    """Write a draft's own tensors and its ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.own_state_dict().items()}
    save_file(tensors, folder / SINGLE_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps(model.config.to_json(), indent=2))


def identity(folder: Path) -> str:
    """A name for a checkpoint's content, cheap enough for a start: ``sha256:...``.

    Covers ``config.json`` and, of every tensor, the name, dtype, shape and the first and last 4 KiB. Two
    trainings of one architecture differ in it; a change in the middle of a tensor alone would not show.
    """
    weights = Weights.open(folder)
    digest = hashlib.sha256(
        json.dumps(read_json(inside(folder, CONFIG_FILE, "the checkpoint")), sort_keys=True).encode()
    )
    for path in sorted(set(weights.files.values())):
        header = _header(path)
        with path.open("rb") as file:
            data = 8 + int.from_bytes(file.read(8), "little")
            for name in sorted(header):
                start, end = header[name]["data_offsets"]
                digest.update(f"{name} {header[name]['dtype']} {header[name]['shape']}".encode())
                for offset in (start, max(start, end - _SAMPLE_BYTES)):
                    file.seek(data + offset)
                    digest.update(file.read(min(_SAMPLE_BYTES, end - offset)))
    return f"sha256:{digest.hexdigest()}"
