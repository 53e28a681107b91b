"""Starting a server: what it refuses, CURVE, devices, the missing extra, and the demo."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time

import dspark_tiny as tiny
import msgspec
import numpy as np
import pytest
import torch
from dspark_tiny import NEW_TOKENS, PROMPTS
from typer.testing import CliRunner

from densemla import ContractError
from densemla.dspark import demo
from densemla.dspark.checkpoint import identity, load_config
from densemla.dspark.cli import app, check_device
from densemla.dspark.engine import DraftEngine
from densemla.dspark.protocol import geometry_of
from densemla.dspark.remote import CurveVerifier, DraftRefusedError, DraftRequest, DraftUnreachableError, RemoteDraft
from densemla.dspark.server import POLL_MILLISECONDS, BindError, DraftServer, is_loopback
from densemla.dspark.speculate import generate
from densemla.dspark.tiny_target import TinyTarget
from densemla.dspark.vllm_proposer import DRAFT_ENV, ENDPOINT_ENV, TIMEOUT_ENV, RemoteDSparkProposer


@pytest.mark.parametrize(
    ("endpoint", "loopback"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.8.9.1:*", True),
        ("tcp://[::1]:5", True),
        ("tcp://localhost:5", True),
        ("ipc:///run/draft.sock", True),
        ("tcp://0.0.0.0:1", False),
        ("tcp://*:1", False),
        ("tcp://10.0.0.1:1", False),
        ("tcp://example.org:1", False),
        ("tcp://eth0:1", False),
        ("udp://127.0.0.1:1", False),
        ("nonsense", False),
    ],
)
def test_what_counts_as_loopback(endpoint, loopback):
    assert is_loopback(endpoint) == loopback


def test_refused_addresses():
    engine = DraftEngine(tiny.make_draft(), checkpoint="", kv_bytes=1 << 20)
    with pytest.raises(BindError, match="other hosts: give CURVE keys"):
        DraftServer(engine, "tcp://0.0.0.0:*")
    for endpoint in ("tcp://127.0.0.1:65536", "tcp://127.0.0.1:99999", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "here"):
        with pytest.raises(BindError, match=r"can't bind '.*expected tcp://HOST:PORT, with a port below 65536"):
            DraftServer(engine, endpoint)
    for seconds in (-0.1, math.nan):
        with pytest.raises(ContractError, match="drain_seconds: expected at least 0"):
            DraftServer(engine, drain_seconds=seconds)
    first = DraftServer(engine)
    try:
        with pytest.raises(BindError, match="can't bind"):
            DraftServer(engine, first.endpoint)
        with pytest.raises(BindError, match="can't serve HTTP"):
            DraftServer(engine, http=first.http)
    finally:
        first.close()


def test_the_command_refuses_what_it_cannot_do(pair, tmp_path):
    def error(*options):
        result = CliRunner().invoke(app, ["serve", "--draft", str(pair[1]), "--target", str(pair[0]), *options])
        assert result.exit_code == 2, result.output
        return result.stderr

    assert "other hosts" in error("--bind", "tcp://0.0.0.0:*", "--http", "off")
    assert "--dtype" in error("--dtype", "fp8")
    assert "HOST:PORT" in error("--http", "here")
    assert "both or neither" in error("--curve-key", "x")
    assert "is no folder" in error("--draft", "/nonexistent")
    assert "device" in error("--device", "cuda:99")
    assert "cpu, cuda or cuda:N" in error("--device", "abacus")
    assert "--depth: expected at most the draft's block size of 5, got 6" in error("--depth", "6")
    assert "byte_budget: expected at most" in error("--kv-mib", "1e9")
    for option, value in (("--kv-mib", "inf"), ("--kv-mib", "nan"), ("--threads", "1" + "0" * 20)):
        assert f"Invalid value for '{option}'" in error(option, value)
    here = ("--bind", "tcp://127.0.0.1:*", "--http", "off")
    for key, verifiers, said in (
        (tmp_path / "none", pair[1], "holds no .key file"),
        (tmp_path / "none", tmp_path / "none", "holds no .key file"),
        (tmp_path / "none", tmp_path, "can't read"),
        (pair[1] / "config.json", tmp_path, "can't read"),
    ):
        (tmp_path / "known.key").touch()
        assert said in error(*here, "--curve-key", str(key), "--curve-verifiers", str(verifiers))


@pytest.mark.parametrize(("arch_list", "fits"), [(["sm_90"], True), (["sm_90a"], True), (["sm_100"], False)])
def test_cuda_is_guarded_by_the_builds_architectures(arch_list, fits, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: arch_list)
    if fits:
        check_device(torch.device("cuda"))
    else:
        with pytest.raises(ContractError, match=r"NVIDIA Test.*sm_100"):
            check_device(torch.device("cuda"))


def test_devices_that_are_not_there():
    check_device(torch.device("cpu"))
    with pytest.raises(ContractError, match="device"):
        check_device(torch.device("mps"))


def test_curve_lets_known_verifiers_in_and_nobody_else(pair, tmp_path):
    def keys(folder, name):
        result = CliRunner().invoke(app, ["keygen", str(tmp_path / folder), name])
        assert result.exit_code == 0, result.output

    keys("server", "server")
    keys("verifiers", "one")
    keys("strangers", "two")
    assert (tmp_path / "server" / "server.key_secret").stat().st_mode & 0o77 == 0
    geometry = geometry_of(load_config(pair[1]), identity(pair[1]))
    options = ("--curve-key", str(tmp_path / "server" / "server.key_secret"))
    options += ("--curve-verifiers", str(tmp_path / "verifiers"))
    rows = torch.zeros(1, geometry.context_width, dtype=torch.bfloat16)
    # Every interface: only CURVE makes this address acceptable.
    with tiny.serve_ready(*pair, *options, bind="tcp://0.0.0.0:*") as (ready, _):
        endpoint = ready["endpoint"].replace("0.0.0.0", "127.0.0.1")
        server_key = tmp_path / "server" / "server.key"
        known = CurveVerifier(tmp_path / "verifiers" / "one.key_secret", server_key)
        with RemoteDraft(endpoint, geometry, curve=known, timeout=2.0) as remote:
            remote.connect(10.0)
            assert remote._link.slab is None
            assert remote.propose([DraftRequest(0, 0, rows, 5, reset=True)]).ge(0).all()
        strangers = CurveVerifier(tmp_path / "strangers" / "two.key_secret", server_key)
        for curve in (None, strangers):
            with RemoteDraft(endpoint, geometry, curve=curve) as remote, pytest.raises(DraftUnreachableError):
                remote.connect(0.4)
    with pytest.raises(ValueError, match="no secret key"):
        RemoteDraft(endpoint, geometry, curve=CurveVerifier(server_key, server_key))


def test_keygen_overwrites_no_key_and_stays_in_its_folder(tmp_path):
    def error(folder, name):
        result = CliRunner().invoke(app, ["keygen", str(tmp_path / folder), name])
        assert result.exit_code == 2, result.output
        return result.stderr

    assert CliRunner().invoke(app, ["keygen", str(tmp_path / "keys"), "server"]).exit_code == 0
    assert "server.key exists already" in error("keys", "server")
    # A secret whose public half is lost may still be in use.
    (tmp_path / "keys" / "server.key").unlink()
    assert "server.key_secret exists already" in error("keys", "server")
    for name in ("", "../server", "a/b"):
        assert "without its folder" in error("other", name)
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]


def test_without_the_extra_the_rest_works_and_says_what_to_install():
    code = """
import sys
for name in ("zmq", "msgspec", "prometheus_client"):
    sys.modules[name] = None
import densemla, densemla.dspark, densemla.dspark.cli
import torch
densemla.dspark.greedy(torch.tensor([[1]]), torch.tensor([[1, 2]]))
try:
    densemla.dspark.RemoteDraft
except ImportError as error:
    print(error)
sys.argv = ["densemla", "demo"]
densemla.dspark.cli.app()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install '.[dspark]'" in done.stdout
    assert "pip install '.[dspark]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_demo_trains_serves_and_compares(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = ["demo", "--seconds", "60", "--max-steps", "2", "--tokens", "12", "--prompts", "1", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    outcome = json.loads(result.stdout)
    assert outcome["equal"] is True
    assert outcome["plain_steps"] == 11
    assert outcome["acceptance_length"] >= 1
    pair = tmp_path / "densemla" / "dspark-demo-1" / "2-steps"
    assert (pair / "target" / "model.safetensors").stat().st_size < 5 << 20
    # The second time the pair is there already.
    again = CliRunner().invoke(app, [*command[:-1]])
    assert again.exit_code == 0, again.output
    assert "training" not in again.stderr
    assert "tokens per second" in again.stdout


def test_the_demo_finds_out_first_that_it_cannot_keep_its_pair(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "train_target", lambda *_: pytest.fail("it trained"))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    result = CliRunner().invoke(app, ["demo", "--cache", str(tmp_path / "link")])
    assert isinstance(result.exception, FileExistsError)


class StandInConfig:
    """What the proposer reads of vLLM's configuration."""

    class model_config:
        max_model_len = 64

        @staticmethod
        def get_vocab_size():
            return 61

    class speculative_config:
        num_speculative_tokens = 3


@pytest.fixture(scope="module")
def token_pair(tmp_path_factory):
    """A token-only draft that helps."""
    target = tiny.make_target()
    good = tiny.make_good_draft(target)
    draft = tiny.make_draft(target_layer_ids=(), markov_rank=61)
    draft.markov_head.load_state_dict(good.markov_head.state_dict())
    return tiny.save_pair(tmp_path_factory.mktemp("tokens"), target, draft)


def run_like_vllm(target, proposer, prompts, count):
    """V1's loop on stand-ins: one token table, rows that move, no request ids."""
    table = np.zeros((len(prompts), 64), np.int32)
    paged = tiny.paged(target)
    rows = []
    for number, prompt in enumerate(prompts):
        logits, _ = paged.step([number], [prompt])
        rows.append({"number": number, "tokens": [*prompt, int(logits[0][-1].argmax())], "prompt": len(prompt)})
    sampled, finished, accepted, step = [[row["tokens"][-1]] for row in rows], {}, 0, 0
    while rows:
        for i, row in enumerate(rows):
            table[i, : len(row["tokens"])] = row["tokens"]
        lengths = np.array([len(row["tokens"]) for row in rows])
        proposals = proposer.propose(sampled, lengths, table) if proposer else [[] for _ in rows]
        assert [len(p) <= 3 for p in proposals] == [True] * len(rows)
        sampled = []
        for row, proposal in zip(rows, proposals, strict=True):
            logits, _ = paged.step([row["number"]], [[row["tokens"][-1], *proposal]])
            choices = logits[0].argmax(-1).tolist()
            good = next((i for i, (p, c) in enumerate(zip(proposal, choices, strict=False)) if p != c), len(proposal))
            paged.truncate(row["number"], len(row["tokens"]) + good)
            row["tokens"] += choices[: good + 1]
            sampled.append(choices[: good + 1])
            accepted += good
        for row in rows:
            if len(row["tokens"]) - row["prompt"] >= count:
                finished[row["number"]] = row["tokens"][row["prompt"] :][:count]
        keep = [i for i, row in enumerate(rows) if row["number"] not in finished]
        rows, sampled = [rows[i] for i in keep], [sampled[i] for i in keep]
        step += 1
        if step % 4 == 0 and len(rows) > 1:
            rows.reverse()
            sampled.reverse()
    return [finished[number] for number in range(len(prompts))], accepted


def test_the_vllm_proposer(token_pair):
    target = TinyTarget.load(token_pair[0], tiny.LAYERS)
    prompts = [[3, 14, 15, 9], [5] * 6, [7, 8]]
    plain, _ = run_like_vllm(target, None, prompts, 24)
    with tiny.serve_ready(*token_pair) as (ready, running):
        env = {ENDPOINT_ENV: ready["endpoint"], DRAFT_ENV: str(token_pair[1]), TIMEOUT_ENV: "3000"}
        proposer = RemoteDSparkProposer(StandInConfig, env)
        proposer.load_model(object())
        tokens, accepted = run_like_vllm(target, proposer, prompts, 24)
        assert tokens == plain
        assert accepted > 20
        # A prompt that is still coming in, and a request without room for another token.
        table = np.zeros((2, 64), np.int32)
        assert proposer.propose([[], [4]], np.array([3, 64]), table) == [[], []]
        running.kill()
        running.wait()
        tokens, accepted = run_like_vllm(target, proposer, prompts, 6)
        assert tokens == [row[:6] for row in plain]
        assert accepted == 0
        proposer.remote.close()


def test_the_vllm_proposer_refuses_what_vllm_cannot_feed(pair, token_pair):
    env = {ENDPOINT_ENV: "tcp://127.0.0.1:9", DRAFT_ENV: str(pair[1])}
    with pytest.raises(ContractError, match="no hidden states"):
        RemoteDSparkProposer(StandInConfig, env)
    with pytest.raises(ContractError, match=ENDPOINT_ENV):
        RemoteDSparkProposer(StandInConfig, {})
    good = {**env, DRAFT_ENV: str(token_pair[1])}
    with pytest.raises(ContractError, match=TIMEOUT_ENV):
        RemoteDSparkProposer(StandInConfig, {**good, TIMEOUT_ENV: "soon"})

    class OtherVocabulary(StandInConfig):
        class model_config:
            max_model_len = 64

            @staticmethod
            def get_vocab_size():
                return 62

    with pytest.raises(ContractError, match="vocabulary of 62"):
        RemoteDSparkProposer(OtherVocabulary, good)


def test_a_long_context_goes_over_in_parts(pair, plain):
    """A server that takes few rows at once still drafts; the first proposals come when all rows are there."""
    engine_rows = 7
    target = TinyTarget.load(pair[0], tiny.LAYERS)
    engine = DraftEngine(
        tiny.make_good_draft(target), checkpoint="", kv_bytes=1 << 22, max_rows=engine_rows, max_batch=8
    )
    with (
        tiny.running(DraftServer(engine, http=None)) as server,
        RemoteDraft(server.endpoint, engine.geometry, timeout=5.0) as remote,
    ):
        remote.connect()
        assert remote.max_rows == engine_rows
        result = generate(tiny.paged(target), PROMPTS, NEW_TOKENS, remote)
    assert result.tokens == plain
    assert result.acceptance_length > 1.5


def test_a_stopped_server_answers_what_is_still_on_its_way(monkeypatch):
    monkeypatch.setattr("densemla.dspark.server.QUIET_MILLISECONDS", 3000)
    engine = DraftEngine(tiny.make_draft(), checkpoint="", kv_bytes=1 << 20)
    rows = torch.zeros(1, engine.geometry.context_width, dtype=torch.bfloat16)
    with (
        tiny.running(DraftServer(engine, http=None, drain_seconds=3.0)) as server,
        RemoteDraft(server.endpoint, engine.geometry, timeout=5.0) as remote,
    ):
        remote.connect()
        server.stop()
        time.sleep(2 * POLL_MILLISECONDS / 1000)
        assert (remote.propose([DraftRequest(0, 0, rows, 5, reset=True)]) >= 0).all()


def test_refusal_survives_a_geometry_of_another_shape(pair):
    fields = msgspec.structs.asdict(geometry_of(load_config(pair[1]), ""))
    engine = DraftEngine(tiny.make_draft(), checkpoint="mine", kv_bytes=1 << 20, depth=2)
    with tiny.running(DraftServer(engine, http=None)) as server:
        geometry = geometry_of(tiny.draft_config(), "yours")
        with RemoteDraft(server.endpoint, geometry) as remote, pytest.raises(DraftRefusedError, match="checkpoint"):
            remote.connect()
        unpinned = type(geometry)(**fields)
        with RemoteDraft(server.endpoint, unpinned, timeout=5.0) as remote:
            remote.connect()
            rows = torch.zeros(1, geometry.context_width, dtype=torch.bfloat16)
            ids = remote.propose([DraftRequest(0, 0, rows, 5, reset=True)])
            assert (ids >= 0).tolist() == [[True, True, False, False, False]]
