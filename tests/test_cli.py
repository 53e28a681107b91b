"""The commands, run as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

import densemla
from densemla import captured, doctor
from densemla.backends.cpu import native
from densemla.cli import app
from densemla.options import PARTIAL_DTYPE_ENV, SINGLE_SPLIT_CHUNKS_ENV
from densemla.presets import PRESETS
from densemla.vllm import PluginStatus, status

LAYER = Path(__file__).parent / "data" / "deepseek_v3_layer.safetensors"
SHORT_STUDY = ("study", "--preset", "kimi-k3-tp8", "--tokens", "320,1k", "--capacity", "16k", "--repeat", "1")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PARTIAL_DTYPE_ENV, raising=False)
    monkeypatch.delenv(SINGLE_SPLIT_CHUNKS_ENV, raising=False)


def densemla_says(*args: str | Path, status: int = 0, columns: int = 80) -> Result:
    result = CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": str(columns)})
    assert result.exit_code == status, (result.output, result.exception)
    assert "Traceback" not in result.output
    return result


def refused(*args: str | Path) -> str:
    """The message of a command that ends with status 2, on one line, with nothing on standard output."""
    result = densemla_says(*args, status=2)
    assert result.stdout == ""
    message = result.stderr.strip()
    assert message.startswith("error: ")
    assert "\n" not in message
    return message


def test_version_and_help() -> None:
    assert densemla_says("--version").stdout.strip() == densemla.__version__
    text = densemla_says("--help").output
    for command in ("study", "presets", "decode", "check", "doctor"):
        assert command in text


def test_presets_are_listed_with_their_heads() -> None:
    lines = densemla_says("presets", columns=120).stdout.splitlines()
    for name, preset in PRESETS.items():
        assert any(
            line.split()[0] == name and str(preset.num_q_heads) in line.split() for line in lines if line.split()
        )


@pytest.fixture(scope="module")
def short_study(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("study")
    result = densemla_says(*SHORT_STUDY, "--json", folder / "study.json", "--plot", folder / "study.png")
    return result.stdout, folder


def test_a_study_prints_a_table_that_fits_80_columns(short_study: tuple[str, Path]) -> None:
    text, folder = short_study
    lines = text.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert "…" not in text
    assert "near-uniform" in text
    assert "heavy-tailed" in text
    words = [line.split() for line in lines]
    rows = json.loads((folder / "study.json").read_text())["rows"]
    # -1 is the plan's 8 chunks: 320 tokens stay in one split, 1024 do not.
    assert ["bf16", "-1", "=", "8", "5", "1"] in [row[:6] for row in words]
    assert ["fp32", "-1", "=", "8", "16", "16"] in [row[:6] for row in words]
    shown = [row for row in words if row and row[0] in ("bf16", "fp32") and not row[1].startswith("partials")]
    assert len(shown) == sum(row["partial_dtype"] is not None for row in rows) == 16
    assert "smaller error in 6 of 6 split cases" in text
    assert "4 of 4 rows equal the one-split run in every bit" in text


def test_a_study_in_json_holds_every_number(short_study: tuple[str, Path]) -> None:
    data = json.loads((short_study[1] / "study.json").read_text())
    assert data["preset"]["num_q_heads"] == 12
    assert (data["seed"], data["backend"], data["num_splits"], data["default_single_split_chunks"]) == (0, "cpu", 32, 8)
    rows = data["rows"]
    assert [(row["tokens"], row["partial_dtype"], row["threshold"]) for row in rows[:5]] == [
        (320, None, "all"),
        (320, "bf16", -1),
        (320, "fp32", -1),
        (320, "bf16", 0),
        (320, "fp32", 0),
    ]
    for bf16, fp32 in pairwise(rows):
        if bf16["partial_dtype"] == "bf16" and bf16["splits"] > 1:
            assert fp32["partial_dtype"] == "fp32"
            assert fp32["error"] < bf16["error"]


def test_a_study_is_drawn(short_study: tuple[str, Path]) -> None:
    from matplotlib.image import imread  # noqa: PLC0415

    pixels = imread(short_study[1] / "study.png")
    assert pixels.shape[1] > pixels.shape[0] > 300
    # The two colours of the partial types are there.
    for colour in ((0xC4, 0x51, 0x2D), (0x2B, 0x6C, 0xA3)):
        near = abs(pixels[..., :3] * 255 - torch.tensor(colour).numpy()).max(-1) < 3
        assert near.sum() > 100


def test_a_study_takes_other_types_thresholds_and_logits(tmp_path: Path) -> None:
    arguments = ("--single-split-chunks", "3", "--logits", "heavy", "--dtype", "fp32", "--kv-dtype", "fp8_ds_mla")
    densemla_says(*SHORT_STUDY, *arguments, "--seed", "5", "--json", tmp_path / "s")
    data = json.loads((tmp_path / "s").read_text())
    assert (data["q_dtype"], data["kv_dtype"], data["seed"], list(data["logits"])) == (
        "float32", "fp8_ds_mla", 5, ["heavy"]
    )  # fmt: skip
    assert {row["threshold"] for row in data["rows"]} == {"all", 3}
    assert data["rows"][0]["gb_per_s"] * data["rows"][0]["time_us"] * 1e3 == pytest.approx(320 * 656)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--preset", "kimi-k9"], "kimi-k3-tp8"),
        (["--tokens", "4q"], "such as 1000,4k,1m"),
        (["--tokens", ""], "such as 1000,4k,1m"),
        (["--tokens", "9" * 5000], "such as 1000,4k,1m"),
        (["--capacity", "1k,2k"], "capacity: expected one length"),
        (["--capacity", "4q"], "capacity: expected"),
        (["--tokens", "64", "--backend", "reference"], "reference"),
        (["--tokens", "1m"], "capacity of 131072"),
        (["--dtype", "fp12"], "bf16, fp16, fp32"),
        (["--kv-dtype", "fp12"], "fp8_ds_mla"),
        (["--logits", "light"], "uniform, heavy"),
        (["--single-split-chunks", "-2"], "single_split_chunks"),
        (["--backend", "abacus"], "auto"),
        (["--device", "abacus"], "cpu, cuda or cuda:N"),
        *(
            (["--plot", f"picture{suffix}"], "one of .png, .svg, .pdf")
            for suffix in (".xyz", ".gif", ".pgf", ".eps", "")
        ),
        (["--json", "no/such/folder/x.json"], "no/such/folder"),
        (["--json", "both.png", "--plot", "./both.png"], "plot: expected another file than --json"),
        (["--tokens", "64", "--seed", str(1 << 64)], "seed: expected an int in"),
        (["--capacity", "0"], "capacity: expected an int in [1, 2147483647], got 0"),
        (["--capacity", "2048m"], "capacity: expected an int in [1, 2147483647]"),
    ],
)
def test_a_study_that_cannot_be_is_refused_before_it_runs(arguments: list[str], said: str) -> None:
    assert said in refused("study", *arguments)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
def test_a_gpu_that_torch_cannot_use_is_explained() -> None:
    assert "built without CUDA" in refused("study", "--device", "cuda")
    assert "built without CUDA" in refused("decode", LAYER, "-o", "unwritten", "--device", "cuda:0")


def test_decode_then_check(tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    densemla_says("decode", LAYER, "-o", out, "--partial-dtype", "fp32", "--single-split-chunks", "0")
    step = captured.load_step(LAYER)
    output, lse = step.decode(densemla.SplitOptions(torch.float32, 0))
    held = load_file(out)
    assert held.keys() == {"output", "lse"}
    assert torch.equal(held["output"], output)
    assert torch.equal(held["lse"], lse)
    with safe_open(out, framework="pt") as file:
        words = file.metadata()
    assert (words["partial_dtype"], words["single_split_chunks"]) == ("fp32", "0")
    assert words["input_sha256"] == captured.sha256(LAYER)
    assert words["densemla"] == densemla.__version__
    assert "all 4 queries agree with float64" in densemla_says("check", LAYER, "--against", out).stdout
    assert list(tmp_path.iterdir()) == [out]


def test_options_come_from_the_environment_and_arguments_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def options(*arguments: str) -> tuple[str, str]:
        densemla_says("decode", LAYER, "-o", tmp_path / "out", *arguments)
        with safe_open(tmp_path / "out", framework="pt") as file:
            words = file.metadata()
        return words["partial_dtype"], words["single_split_chunks"]

    assert options() == ("bf16", "-1")
    monkeypatch.setenv(PARTIAL_DTYPE_ENV, "fp32")
    monkeypatch.setenv(SINGLE_SPLIT_CHUNKS_ENV, "7")
    assert options() == ("fp32", "7")
    assert options("--partial-dtype", "bf16", "--single-split-chunks", "0") == ("bf16", "0")
    monkeypatch.setenv(PARTIAL_DTYPE_ENV, "fp16")
    assert PARTIAL_DTYPE_ENV in refused("decode", LAYER, "-o", tmp_path / "out")


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
def test_check_decodes_when_it_has_no_result(backend: str) -> None:
    assert "all 4 queries agree" in densemla_says("check", LAYER, "--backend", backend).stdout


def test_check_names_the_rows_that_are_off(tmp_path: Path) -> None:
    out = tmp_path / "out"
    densemla_says("decode", LAYER, "-o", out)
    held = load_file(out)
    held["output"][3, 1] += 1
    held["lse"][0, 2] = torch.nan
    save_file(held, out)
    text = densemla_says("check", LAYER, "--against", out, status=1).stdout
    assert "2 of 4 queries are off" in text
    table = [line.split() for line in text.splitlines() if line.startswith("  ") and "of" in line]
    # query, request, cache_seqlen, heads off ...; queries 2 and 3 belong to request 2.
    assert [row[:6] for row in table] == [["0", "0", "11", "1", "of", "4"], ["3", "2", "75", "1", "of", "4"]]
    assert table[0][-1] == "nan"
    assert table[1][6] == "1"


def test_check_takes_a_tolerance() -> None:
    split = ("check", LAYER, "--single-split-chunks", "0")
    densemla_says(*split)
    text = densemla_says(*split, "--tolerance", "1e-4", status=1).stdout
    assert "2 of 4 queries are off" in text
    assert "tolerance" in refused(*split, "--tolerance", "-1")


def test_broken_files_are_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "nothing.st: No such file" in refused("decode", tmp_path / "nothing.st", "-o", out)
    assert f"{tmp_path}: Is a directory" in refused("check", tmp_path)
    text = tmp_path / "text"
    text.write_text("q")
    assert "a safetensors file" in refused("decode", text, "-o", out)
    lacking = tmp_path / "lacking"
    tensors = captured.load_step(LAYER).tensors()
    save_file({name: tensors[name] for name in ("q", "kv_cache", "cache_seqlens")}, lacking, {"sm_scale": "1"})
    assert "page_table: expected a tensor of this name" in refused("decode", lacking, "-o", out)
    assert "no folder" in refused("decode", LAYER, "-o", tmp_path / "none" / "out")
    # Brackets are text, not markup.
    assert "[none]" in refused("decode", LAYER, "-o", tmp_path / "[none]" / "out")
    assert f"{tmp_path}: expected a file to write, got a directory" in refused("decode", LAYER, "-o", tmp_path)
    assert "got a directory" in refused(*SHORT_STUDY, "--json", tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "got a device, a pipe or a socket" in refused("decode", LAYER, "-o", tmp_path / "pipe")
    assert "another file than INPUT" in refused("decode", lacking, "-o", lacking)
    assert "output: expected" in refused("check", LAYER, "--against", LAYER)
    assert "against" in refused("check", LAYER, "--against", lacking, "--partial-dtype", "fp32")
    assert not out.exists()


def test_a_result_that_may_not_be_written_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Permissions do not bind root, who may run this.
    protected = (tmp_path, tmp_path / "old.png")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK or path not in protected)
    monkeypatch.setattr("densemla.cli.run_study", lambda *_: pytest.fail("it ran"))
    assert "no permission" in refused("study", "--json", tmp_path / "new")
    (tmp_path / "old.png").touch()
    assert "no permission" in refused("study", "--plot", tmp_path / "old.png")


def test_a_reader_that_leaves_early_is_no_error() -> None:
    # -u: the pipe is noticed when it is written to, not when Python ends.
    command = f"{sys.executable} -u -m densemla.cli --version | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_brackets_in_names_are_no_markup(tmp_path: Path) -> None:
    # Rich would take the first for an end tag that has no beginning, the second for a colour.
    folder = tmp_path / "["
    folder.mkdir()
    out = folder / "x].safetensors"
    densemla_says("decode", LAYER, "-o", tmp_path / "out")
    assert f"{out}: output" in densemla_says("decode", LAYER, "-o", out).stdout
    assert "all 4 queries agree" in densemla_says("check", LAYER, "--against", out).stdout
    odd = folder / "y].safetensors"
    save_file({**captured.load_step(LAYER).tensors(), "[red]odd": torch.zeros(1)}, odd, {"sm_scale": "1"})
    assert f"{odd}: [red]odd: expected" in refused("check", odd)


def test_options_for_a_backend_without_splits_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for option, value in (("--partial-dtype", "fp32"), ("--single-split-chunks", "0")):
        message = refused("decode", LAYER, "-o", out, "--backend", "reference", option, value)
        assert option[2:].replace("-", "_") in message
    assert not out.exists()
    densemla_says("decode", LAYER, "-o", out, "--backend", "reference")
    with safe_open(out, framework="pt") as file:
        assert "partial_dtype" not in file.metadata()


def test_a_step_that_breaks_the_contract_is_refused(tmp_path: Path) -> None:
    tensors = captured.load_step(LAYER).tensors()
    tensors["page_table"][2, 0] = 99
    save_file(tensors, tmp_path / "step", {"sm_scale": "1"})
    assert "page_table: expected page ids in [0, 7)" in refused("decode", tmp_path / "step", "-o", tmp_path / "out")
    assert "page_table" in refused("check", tmp_path / "step")


def test_the_installed_command_ends_without_a_traceback() -> None:
    command = [sys.executable, "-m", "densemla.cli", "check", "nothing.safetensors"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == "error: nothing.safetensors: No such file or directory"


def test_doctor_says_what_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    text = densemla_says("doctor", columns=200).stdout
    assert torch.__version__ in text
    for name in densemla.backend_names():
        assert f"backend {name} on cpu" in text
    assert status().detail in " ".join(text.split())
    monkeypatch.setenv(SINGLE_SPLIT_CHUNKS_ENV, "many")
    text = densemla_says("doctor", columns=200, status=1).stdout
    assert f"{SINGLE_SPLIT_CHUNKS_ENV}: expected" in text


@pytest.mark.parametrize(("isa", "state", "said"), [(None, "-", "C compiler"), ("avx512", "ok", "decode avx512")])
def test_doctor_says_whether_the_cpu_decode_was_compiled(
    monkeypatch: pytest.MonkeyPatch, isa: str | None, state: str, said: str
) -> None:
    monkeypatch.setattr(native, "available", lambda: isa)
    text = densemla_says("doctor", columns=500).stdout
    line = next(line for line in text.splitlines() if line.split()[:1] == ["cpu"])
    assert line.split()[1] == state
    assert said in line


class FakeGPU:
    name, total_memory, major, minor = "Fake 5090", 32 << 30, 12, 0


@pytest.mark.parametrize(("arch_list", "status"), [(["sm_90", "sm_120"], 0), (["sm_80", "sm_100"], 1)])
def test_doctor_judges_a_gpu(monkeypatch: pytest.MonkeyPatch, arch_list: list[str], status: int) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    # Those that touch no GPU: this one is not there.
    monkeypatch.setattr(doctor, "backend_names", lambda: ("cpu", "reference"))
    for name, value in (
        ("is_available", True),
        ("device_count", 1),
        ("get_arch_list", arch_list),
        ("get_device_name", FakeGPU.name),
        ("get_device_properties", FakeGPU),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(doctor, "status", lambda: PluginStatus(installed=False, active=False, detail="no vLLM"))
    text = densemla_says("doctor", columns=500, status=status).stdout
    line = next(line for line in text.splitlines() if line.split()[:1] == ["cuda:0"])
    for part in (FakeGPU.name, "32 GiB", "12.0", *arch_list):
        assert part in line
    assert ("Install a build of torch" in line) == bool(status)
    assert "backend cpu on cuda:0" in text
    assert "it runs on the CPU, not on cuda:0" in text
