"""The tiny checkpoint, what transformers answers with it, and vLLM engines over it."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3ForCausalLM
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.inputs import TokensPrompt

from densemla.vllm.steps import StepDecoder

ROOT = Path(__file__).parents[2]

PROMPT_LENGTHS = (1, 5, 16, 17, 63, 64, 65, 130, 200, 333)
NEW_TOKENS = 16
LAYERS = 2

NEAR_TIE = 1e-3
"""Logits closer than this could be told apart by rounding alone."""

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 16,
    # vLLM 0.32's CPU rotary op is wrong for several heads; and a CPU with AMX would choose AMX_MLA.
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},
    "attention_backend": "CPU_MLA",
}


@dataclass(frozen=True)
class Reference:
    """Prompts, and what transformers answers, greedily."""

    checkpoint: Path
    prompts: list[list[int]]
    answers: list[list[int]]


def make_reference(checkpoint: Path) -> Reference:
    spec = importlib.util.spec_from_file_location("make_tiny_deepseek", ROOT / "scripts" / "make_tiny_deepseek.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    maker.make(checkpoint)
    model = DeepseekV3ForCausalLM.from_pretrained(checkpoint).eval()
    gen = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, maker.VOCAB, (n,), generator=gen).tolist() for n in PROMPT_LENGTHS]
    answers = []
    for prompt in prompts:
        made = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            return_dict_in_generate=True,
            output_scores=True,
        )
        best = torch.stack([scores[0] for scores in made.scores]).topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > NEAR_TIE, "choose another seed: this checkpoint has near ties"
        answers.append(made.sequences[0, len(prompt) :].tolist())
    return Reference(checkpoint, prompts, answers)


@contextlib.contextmanager
def engine(
    reference: Reference, *, environment: dict[str, str] | None = None, worker_process: bool = False, **options: object
) -> Iterator[LLM]:
    """An ``LLM`` over the tiny checkpoint, in this process unless a worker process is asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", str(int(worker_process)))
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        llm = LLM(str(reference.checkpoint), **{**OPTIONS, **options})
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            if not worker_process:
                cleanup_dist_env_and_memory()


def greedy(llm: LLM, prompts: list[list[int]], logprobs: int | None = None) -> list[Any]:
    """Completions of all ``prompts``, batched together."""
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=logprobs),
        use_tqdm=False,
    )
    return [output.outputs[0] for output in outputs]


def tokens(completions: list[Any]) -> list[list[int]]:
    return [list(completion.token_ids) for completion in completions]


@dataclass(frozen=True)
class DecodeCall:
    """One layer's decode: by whom, queries per request, visible lengths."""

    decoder: StepDecoder
    queries: list[int]
    lengths: list[int]


@contextlib.contextmanager
def recorded_decodes() -> Iterator[list[DecodeCall]]:
    """Every decode of this process while the context is open."""
    calls: list[DecodeCall] = []
    genuine = StepDecoder.decode

    def recording(self: StepDecoder, q: Any, cache: Any, table: Any, lengths: Any, cu: Any, **rest: Any) -> Any:
        calls.append(DecodeCall(self, cu.diff().tolist(), lengths.tolist()))
        return genuine(self, q, cache, table, lengths, cu, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepDecoder, "decode", recording)
        yield calls
