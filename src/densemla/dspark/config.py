"""Sizes of a DSpark draft, read from a checkpoint's ``config.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..checks import check_int, is_int
from ..errors import ContractError

_LARGEST_SIZE = (1 << 31) - 1
_MOST_LAYERS = 1024
"""More than any model has; a number without end would fill the memory with layers before a weight is read."""


def _check_number(name: str, value: object, least: float, *, beyond: bool = False) -> None:
    """``value`` must be a finite number of at least ``least``, or ``beyond`` it."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < least or (beyond and value == least):  # type: ignore[arg-type,operator]
        raise ContractError(name, f"a number {'above' if beyond else 'of at least'} {least:g}", repr(value))


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ContractError(name, "true or false", repr(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions, plain or with DeepSeek's YaRN.

    Attributes:
        theta: base of the frequencies.
        interleave: rotate neighbouring columns (DeepSeek-V3), not column ``i`` with ``i + d / 2``.
        factor: YaRN's context extension; 1 is plain RoPE, and the fields below then do not matter.
        original_max_position_embeddings: context length before the extension, in tokens.
        beta_fast: turns over the original context above which a frequency is left alone.
        beta_slow: turns below which it is divided by ``factor``.
        mscale: numerator of the factor on cosine and sine.
        mscale_all_dim: its denominator; squared, it also scales the scores.
    """

    theta: float = 10000.0
    interleave: bool = True
    factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        _check_number("rope theta", self.theta, 1, beyond=True)
        _check_flag("rope interleave", self.interleave)
        _check_number("rope factor", self.factor, 1)
        check_int("rope original_max_position_embeddings", self.original_max_position_embeddings, 1, _LARGEST_SIZE)
        for name in ("beta_fast", "beta_slow"):
            _check_number(f"rope {name}", getattr(self, name), 0, beyond=True)
        for name in ("mscale", "mscale_all_dim"):
            _check_number(f"rope {name}", getattr(self, name), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """Sizes of a stack of dense MLA decoder layers of the DeepSeek-V3 kind.

    Attributes:
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated (SiLU) MLP.
        num_hidden_layers: decoder layers.
        num_attention_heads: query heads.
        q_lora_rank: rank of the query projection; None projects directly.
        kv_lora_rank: latent width.
        qk_nope_head_dim: unrotated width of a head.
        qk_rope_head_dim: rotated width, shared by all heads on the key side.
        v_head_dim: value width of a head.
        vocab_size: token ids are in ``[0, vocab_size)``.
        rms_norm_eps: epsilon of every RMS norm.
        max_position_embeddings: positions are in ``[0, max_position_embeddings)``.
        rope: None leaves the ``qk_rope_head_dim`` columns unrotated (NoPE).
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    vocab_size: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 131072
    rope: RopeConfig | None = RopeConfig()

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "vocab_size",
            "max_position_embeddings",
        ):
            check_int(name, getattr(self, name), 1, _MOST_LAYERS if name == "num_hidden_layers" else _LARGEST_SIZE)
        if self.q_lora_rank is not None:
            check_int("q_lora_rank", self.q_lora_rank, 1, _LARGEST_SIZE)
        _check_number("rms_norm_eps", self.rms_norm_eps, 0, beyond=True)
        if self.rope is not None and self.qk_rope_head_dim % 2:
            raise ContractError("qk_rope_head_dim", "an even number of columns to rotate", self.qk_rope_head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkConfig(MLAConfig):
    """Sizes of a draft.

    Attributes:
        target_hidden_size: width of the target's residual stream.
        target_layer_ids: target layers (counted from 0) whose outputs make a context row, concatenated
            in this order. Empty: a token-only draft, whose context is the embedding of the token itself.
        mask_token_id: stands in the block for the tokens that are still to be drafted.
        markov_rank: rank of the Markov head; 0 for a draft without one.
        block_size: tokens drafted by one pass. Row 0 of the block is the anchor (the newest token) and
            row ``i`` predicts the token ``i + 1`` places after it.
    """

    target_hidden_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    markov_rank: int
    block_size: int

    def __post_init__(self) -> None:
        # super() without arguments needs the class cell, which slots=True replaces.
        MLAConfig.__post_init__(self)
        check_int("target_hidden_size", self.target_hidden_size, 1, _LARGEST_SIZE)
        check_int("block_size", self.block_size, 1, _LARGEST_SIZE)
        check_int("markov_rank", self.markov_rank, 0, _LARGEST_SIZE)
        if not is_int(self.mask_token_id, 0, self.vocab_size - 1):
            expected = f"a token in [0, vocab_size = {self.vocab_size})"
            raise ContractError("mask_token_id", expected, repr(self.mask_token_id))
        if not all(is_int(layer, 0) for layer in self.target_layer_ids):
            raise ContractError("target_layer_ids", "layer numbers from 0", self.target_layer_ids)

    @property
    def context_width(self) -> int:
        """Values in a context row: all captured layers side by side; 0 for a token-only draft."""
        return len(self.target_layer_ids) * self.target_hidden_size

    def to_json(self) -> dict[str, Any]:
        """The fields as :func:`draft_config` reads them back."""
        fields = asdict(self)
        rope = fields.pop("rope")
        return {
            **fields,
            "target_layer_ids": list(self.target_layer_ids),
            "model_type": "k3_dspark",
            "mla_use_nope": rope is None,
            **({} if rope is None else _rope_json(rope)),
        }


KIMI_K3_DSPARK = DSparkConfig(
    hidden_size=7168,
    intermediate_size=14336,
    num_hidden_layers=5,
    num_attention_heads=64,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    vocab_size=163840,
    rms_norm_eps=1e-5,
    max_position_embeddings=1048576,
    rope=RopeConfig(theta=50000.0, factor=32.0, original_max_position_embeddings=32768, mscale=1.0, mscale_all_dim=1.0),
    target_hidden_size=7168,
    target_layer_ids=(2, 23, 47, 71, 89),
    mask_token_id=163837,
    markov_rank=256,
    block_size=7,
)
"""The published draft for Kimi-K3 (``k3_dspark``), 3.6 billion parameters with the shared embedding."""

_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "markov_head_type": ("vanilla",),
    "mla_use_output_gate": (False,),
    "mla_use_qk_norm": (False,),
    "attention_bias": (False,),
    "fc_norm": (False, None),
    "sample_from_anchor": (True,),
    "quantization_config": (None,),
}
"""Fields with which a checkpoint would ask for a model that this one is not; absent ones are fine."""


def draft_config(fields: Mapping[str, Any]) -> DSparkConfig:
    """The draft that the fields of a ``config.json`` describe.

    Raises:
        ContractError: a field is missing, out of range, or asks for a variant that is not implemented.
    """
    for name, accepted in _FIXED.items():
        if name in fields and fields[name] not in accepted:
            raise ContractError(f"config field {name!r}", " or ".join(map(repr, accepted)), repr(fields[name]))
    if fields.get("draft_vocab_size", fields.get("vocab_size")) != fields.get("vocab_size"):
        raise ContractError(
            "config field 'draft_vocab_size'", f"vocab_size = {fields.get('vocab_size')}", fields["draft_vocab_size"]
        )
    stack = mla_fields(fields)
    layers = _required(fields, "target_layer_ids")
    if not isinstance(layers, (list, tuple)):
        raise ContractError("config field 'target_layer_ids'", "a list of layer numbers", repr(layers))
    return DSparkConfig(
        **stack,
        target_hidden_size=_required(fields, "target_hidden_size"),
        target_layer_ids=tuple(layers),
        mask_token_id=_required(fields, "mask_token_id"),
        markov_rank=_required(fields, "markov_rank"),
        # The published config leaves it to the caller; 7 is what the draft was trained for.
        block_size=fields.get("block_size", KIMI_K3_DSPARK.block_size),
    )


def mla_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of :class:`MLAConfig` from the fields of a ``config.json``."""
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "vocab_size",
        "rms_norm_eps",
        "max_position_embeddings",
    )
    return {**{name: _required(fields, name) for name in names}, "rope": _rope(fields)}


def _rope(fields: Mapping[str, Any]) -> RopeConfig | None:
    unrotated = fields.get("mla_use_nope", False)
    _check_flag("config field 'mla_use_nope'", unrotated)
    if unrotated:
        return None
    # transformers calls the same object rope_scaling in older files.
    name = "rope_scaling" if fields.get("rope_parameters") is None else "rope_parameters"
    given = {} if fields.get(name) is None else fields[name]
    if not isinstance(given, Mapping):
        raise ContractError(f"config field {name!r}", "an object", repr(given))
    kind = given.get("rope_type", given.get("type", "default"))
    theta = given.get("rope_theta", fields.get("rope_theta", 10000.0))
    interleave = fields.get("rope_interleave", True)
    if kind == "default":
        return RopeConfig(theta=theta, interleave=interleave)
    if kind not in ("yarn", "deepseek_yarn"):
        raise ContractError("config field 'rope_type'", "'default' or 'yarn'", repr(kind))
    plain = RopeConfig()
    return RopeConfig(
        theta=theta,
        interleave=interleave,
        factor=_required(given, "factor"),
        original_max_position_embeddings=_required(given, "original_max_position_embeddings"),
        beta_fast=given.get("beta_fast", plain.beta_fast),
        beta_slow=given.get("beta_slow", plain.beta_slow),
        mscale=given.get("mscale", plain.mscale),
        mscale_all_dim=given.get("mscale_all_dim", plain.mscale_all_dim),
    )


def _rope_json(rope: Mapping[str, Any]) -> dict[str, Any]:
    rest = dict(rope)
    theta, interleave = rest.pop("theta"), rest.pop("interleave")
    parameters = {"rope_type": "default"} if rest["factor"] == 1 else {"rope_type": "yarn", **rest}
    return {"rope_interleave": interleave, "rope_parameters": {"rope_theta": theta, **parameters}}


def _required(fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise ContractError(f"config field {name!r}", "to be present", "nothing")
    return fields[name]
