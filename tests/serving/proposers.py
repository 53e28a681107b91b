"""A draft proposer for vLLM's ``custom_class`` method that is right about some tokens and wrong about others."""

from __future__ import annotations

from typing import Any, ClassVar

VOCAB = 512


class HalfRight:
    """Proposes one to three tokens of the known answer; from every second request the last one is wrong."""

    known: ClassVar[list[list[int]]] = []
    """Prompts with their answers; set by the test."""
    proposed: ClassVar[list[int]] = []

    def __init__(self, vllm_config: Any) -> None:
        self.limit = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, target_model: Any) -> None:
        pass

    def propose(
        self, sampled_token_ids: Any, num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        del slot_mappings
        drafts = []
        for i, sampled in enumerate(sampled_token_ids):
            sofar = token_ids_cpu[i, : num_tokens_no_spec[i]].tolist()
            following = next((full[len(sofar) :] for full in self.known if full[: len(sofar)] == sofar), [])
            draft = following[: 1 + i % self.limit] if len(sampled) else []
            if draft and i % 2:
                draft[-1] = (draft[-1] + 1) % VOCAB
            drafts.append(draft)
            self.proposed.append(len(draft))
        return drafts
