"""Checkpoints: what is read, what is refused, and what the message says."""

from __future__ import annotations

import json
import shutil

import dspark_tiny as tiny
import pytest
import torch
from safetensors.torch import load_file, save_file

from densemla.dspark.checkpoint import (
    CONFIG_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    CheckpointError,
    Weights,
    identity,
    load_config,
    load_draft,
    save_draft,
)


def shard(folder, files):
    """Write ``{file: tensors}`` with an index, in place of the single file."""
    (folder / SINGLE_FILE).unlink(missing_ok=True)
    weight_map = {}
    for name, tensors in files.items():
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def folders(pair, tmp_path):
    """A copy that a test may break."""
    for name, folder in zip(("target", "draft"), pair, strict=True):
        shutil.copytree(folder, tmp_path / name)
    return tmp_path / "target", tmp_path / "draft"


def test_a_draft_and_its_targets_two_tensors(folders):
    target, draft = folders
    model = load_draft(draft, target, dtype=torch.float32)
    original = tiny.make_good_draft(tiny.make_target())
    for name, tensor in original.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert load_draft(draft, target).context_proj.weight.dtype is torch.bfloat16
    assert load_config(draft) == original.config


def test_only_what_is_needed_is_read_of_a_sharded_target(folders):
    target, draft = folders
    tensors = load_file(target / SINGLE_FILE)
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    padded = torch.cat((head, torch.full((3, head.shape[1]), 7.0)))
    other = {"model.norm.weight": tensors["model.norm.weight"]}
    shard(target, {"a.safetensors": {"language_model.model.embed_tokens.weight": embedding},
                   "b.safetensors": {"language_model.lm_head.weight": padded}, "c.safetensors": other})  # fmt: skip
    # Nobody opens the shard that holds neither.
    (target / "c.safetensors").write_bytes(b"not weights at all")
    model = load_draft(draft, target, dtype=torch.float32)
    assert torch.equal(model.lm_head.weight, head)
    assert torch.equal(model.embed_tokens.weight, embedding)


def test_tied_embeddings_and_a_draft_with_copies_of_its_own(folders):
    target, draft = folders
    embedding = load_file(target / SINGLE_FILE)["model.embed_tokens.weight"]
    shard(target, {"a.safetensors": {"model.embed_tokens.weight": embedding}})
    assert torch.equal(load_draft(draft, target, dtype=torch.float32).lm_head.weight, embedding)
    own = load_file(draft / SINGLE_FILE)
    extra = {"embed_tokens.weight": embedding + 1, "confidence_head.proj.weight": torch.ones(1, 4)}
    save_file({**own, **extra}, draft / SINGLE_FILE)
    assert torch.equal(load_draft(draft, target, dtype=torch.float32).embed_tokens.weight, embedding)
    assert torch.equal(load_draft(draft, draft, dtype=torch.float32).embed_tokens.weight, embedding + 1)


@pytest.mark.parametrize("escape", ["absolute", "dots", "link", "linked folder"])
@pytest.mark.parametrize("whose", ["target", "draft"])
def test_paths_that_leave_the_folder_are_refused(escape, whose, folders, tmp_path):
    folder = dict(zip(("target", "draft"), folders, strict=True))[whose]
    outside = tmp_path / "outside"
    outside.mkdir()
    shutil.move(folder / SINGLE_FILE, outside / "w.safetensors")
    names = {
        "absolute": str(outside / "w.safetensors"),
        "dots": "../outside/w.safetensors",
        "link": "w.safetensors",
        "linked folder": "sub/w.safetensors",
    }
    if escape == "link":
        (folder / "w.safetensors").symlink_to(outside / "w.safetensors")
    if escape == "linked folder":
        (folder / "sub").symlink_to(outside)
    tensors = load_file(outside / "w.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, names[escape])}))
    with pytest.raises(CheckpointError, match=r"outside .* refused.*plain folder"):
        load_draft(folders[1], folders[0])


def test_a_link_inside_the_folder_is_fine(folders):
    target, draft = folders
    (draft / "real.safetensors").write_bytes((draft / SINGLE_FILE).read_bytes())
    (draft / SINGLE_FILE).unlink()
    (draft / SINGLE_FILE).symlink_to("real.safetensors")
    load_draft(draft, target)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def drop(path, name):
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)


def promise(folder, name):
    """An index that names a tensor which its file lacks."""
    tensors = load_file(folder / SINGLE_FILE)
    (folder / SINGLE_FILE).rename(folder / "w.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "w.safetensors")}))
    drop(folder / "w.safetensors", name)


def change(path, name, tensor):
    save_file({**load_file(path), name: tensor}, path)


BREAKAGES = {
    "no folder": (lambda t, d: shutil.rmtree(d), "draft is no folder"),
    "no config": (lambda t, d: (d / CONFIG_FILE).unlink(), "config.json is missing.*download"),
    "config is no json": (lambda t, d: (d / CONFIG_FILE).write_text("{"), "config.json can't be read as JSON"),
    "config is deep": (
        lambda t, d: (d / CONFIG_FILE).write_text('{"a":' * 100_000),
        "config.json can't be read as JSON",
    ),
    "config is a list": (lambda t, d: (d / CONFIG_FILE).write_text("[]"), "config.json holds no JSON object"),
    "config lacks a field": (
        lambda t, d: (d / CONFIG_FILE).write_text(json.dumps({"hidden_size": 5})),
        "config.json: config field 'intermediate_size'",
    ),
    "no weights": (lambda t, d: (d / SINGLE_FILE).unlink(), "neither model.safetensors.index.json nor"),
    "index without map": (lambda t, d: (d / INDEX_FILE).write_text("{}"), "has no 'weight_map'"),
    "missing shard": (
        lambda t, d: (d / INDEX_FILE).write_text('{"weight_map": {"a": "gone.safetensors"}}'),
        "gone.safetensors is missing",
    ),
    "truncated weights": (lambda t, d: cut(d / SINGLE_FILE), "draft/model.safetensors is damaged.*download this file"),
    "garbage weights": (lambda t, d: (d / SINGLE_FILE).write_bytes(b"\xff" * 50), "model.safetensors is damaged"),
    "missing tensor": (
        lambda t, d: drop(d / SINGLE_FILE, "final_norm.weight"),
        "draft lacks the tensor final_norm.weight",
    ),
    "promised tensor": (
        lambda t, d: promise(d, "final_norm.weight"),
        "w.safetensors lacks the tensor final_norm.weight that the index promises",
    ),
    "wrong shape": (
        lambda t, d: change(d / SINGLE_FILE, "context_proj.weight", torch.ones(48, 7)),
        r"tensor context_proj.weight has shape \[48, 7\], expected \[48, 144\]",
    ),
    "wrong dtype": (
        lambda t, d: change(d / SINGLE_FILE, "final_norm.weight", torch.ones(48, dtype=torch.int8)),
        "tensor final_norm.weight is torch.int8",
    ),
    "another model": (
        lambda t, d: change(d / SINGLE_FILE, "layers.0.mlp.experts.0.weight", torch.ones(1)),
        "tensors of another model, such as layers.0.mlp.experts.0.weight",
    ),
    "target without head": (
        lambda t, d: shard(t, {"a.safetensors": {"model.norm.weight": torch.ones(48)}}),
        "target has no tensor for the embedding: looked for model.embed_tokens.weight",
    ),
    "smaller vocabulary": (
        lambda t, d: change(t / SINGLE_FILE, "lm_head.weight", torch.ones(60, 48)),
        r"lm_head.weight has shape \[60, 48\], expected at least \[61, 48\]",
    ),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_broken_checkpoint_says_what_and_where(breakage, folders):
    ruin, message = BREAKAGES[breakage]
    ruin(*folders)
    with pytest.raises(CheckpointError, match=message):
        load_draft(folders[1], folders[0])


def test_identity_follows_the_content(folders, tmp_path):
    _, draft = folders
    first = identity(draft)
    assert first.startswith("sha256:")
    shutil.copytree(draft, tmp_path / "copy")
    assert identity(tmp_path / "copy") == first
    tensors = load_file(draft / SINGLE_FILE)
    tensors["final_norm.weight"][-1] += 1
    save_file(tensors, draft / SINGLE_FILE)
    second = identity(draft)
    fields = json.loads((draft / CONFIG_FILE).read_text())
    (draft / CONFIG_FILE).write_text(json.dumps({**fields, "rms_norm_eps": 1e-5}))
    assert len({first, second, identity(draft)}) == 3


def test_saved_drafts_hold_no_shared_tensor(tmp_path):
    save_draft(tiny.make_draft(), tmp_path)
    assert not [name for name in Weights.open(tmp_path).files if name.startswith(("embed_tokens", "lm_head"))]
