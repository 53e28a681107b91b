"""Attention shapes of models that people serve, as one rank sees them in decode.

GLM-5's is that of its ``config.json`` (``zai-org/GLM-5-FP8`` on Hugging Face): ``num_attention_heads`` 64,
``kv_lora_rank`` 512, ``qk_nope_head_dim`` 192, ``qk_rope_head_dim`` 64, ``v_head_dim`` 256, rope not stretched. The
model attends to the ``index_topk`` = 2048 tokens that its indexer picks for a query (DeepSeek sparse attention), which
are all tokens as long as no more are visible; a dense decode of a longer request is not what the model computes.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ContractError


@dataclass(frozen=True, slots=True)
class Preset:
    """One rank's absorbed MLA decode.

    Attributes:
        num_q_heads: query heads on the rank.
        sm_scale: factor on the scores; ``(qk_nope_head_dim + qk_rope_head_dim) ** -0.5`` with 128 + 64
            (GLM-5: 192 + 64). A model whose rope is stretched (YaRN) multiplies it further.
    """

    name: str
    num_q_heads: int
    note: str
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    page_size: int = 64
    sm_scale: float = 192**-0.5


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("kimi-k3", 96, "Kimi-K3, all heads on one rank"),
        Preset("kimi-k3-tp8", 12, "Kimi-K3, tensor parallel over 8 ranks"),
        Preset("deepseek-v3", 128, "DeepSeek-V3, all heads on one rank"),
        Preset("kimi-k2", 64, "Kimi-K2, all heads on one rank"),
        Preset("glm-5", 64, "GLM-5 without its token index, all heads on one rank", sm_scale=256**-0.5),
    )
}


def preset(name: str) -> Preset:
    """The preset called ``name``, or a :class:`ContractError` that lists them."""
    if not isinstance(name, str) or name not in PRESETS:
        raise ContractError("preset", "one of " + ", ".join(PRESETS), repr(name))
    return PRESETS[name]
