"""Capture one decode step of a DeepSeek-V3 attention layer of `transformers`, as a file for `densemla decode`.

The layer has DeepSeek-V3's architecture (latent 512, rope 64, YaRN) with few heads and random weights. Its
queries, latents and rotated keys are recorded while the model runs, and stored absorbed: q_nope @ W_UK
beside the rotated part, and a paged cache of normalised latents beside the rotated keys. The layer's own
per-head attention output, its output behind o_proj and the two weights that lead there (W_UV, W_O) go along
under `layer.`, so that a test can follow densemla's output through to the layer's.

    pip install transformers
    python scripts/capture_deepseek_layer.py tests/data/deepseek_v3_layer.safetensors
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers
from transformers import DeepseekV3Config, DeepseekV3Model
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import eager_attention_forward

from densemla import kv_cache
from densemla.captured import CapturedStep, save_step

LENGTHS = (11, 16, 75)
QUERIES = (1, 1, 2)
PAGE_SIZE = 16


def main(path: Path) -> None:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=48,
        v_head_dim=8,
        initializer_range=0.1,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )
    seen: dict[str, torch.Tensor] = {}

    def recording(module, query, key, value, attention_mask, **kwargs):
        output, weights = eager_attention_forward(module, query, key, value, attention_mask, **kwargs)
        seen.update(query=query[0], key=key[0], heads=output[0])
        return output, weights

    ALL_ATTENTION_FUNCTIONS.register("recording", recording)
    ALL_MASK_ATTENTION_FUNCTIONS.register("recording", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    config._attn_implementation = "recording"
    model = DeepseekV3Model(config).eval()
    layer = model.layers[0].self_attn
    layer.kv_a_layernorm.register_forward_hook(lambda _module, _args, out: seen.update(latent=out[0]))
    layer.o_proj.register_forward_hook(lambda _module, _args, out: seen.update(output=out[0]))

    nope, rank, heads = config.qk_nope_head_dim, config.kv_lora_rank, config.num_attention_heads
    w_uk, w_uv = layer.kv_b_proj.weight.detach().view(heads, -1, rank).split((nope, config.v_head_dim), dim=1)
    pages = [-(-length // PAGE_SIZE) for length in LENGTHS]
    ids = torch.randperm(sum(pages)).split(pages)
    cache = kv_cache.empty(sum(pages), PAGE_SIZE, torch.float32).fill_(torch.nan)
    table = torch.full((len(LENGTHS), max(pages)), -1, dtype=torch.int32)
    q, layer_heads, layer_output = [], [], []
    for i, (length, queries) in enumerate(zip(LENGTHS, QUERIES, strict=True)):
        with torch.no_grad():
            model(input_ids=torch.randint(config.vocab_size, (1, length)), use_cache=False)
        table[i, : pages[i]] = ids[i]
        tokens = torch.arange(length)
        slots = table[i, tokens // PAGE_SIZE].long() * PAGE_SIZE + tokens % PAGE_SIZE
        kv_cache.append(seen["latent"], seen["key"][0, :, nope:], cache, slots)
        query = seen["query"][:, -queries:]
        absorbed = torch.einsum("htd,hdr->htr", query[..., :nope], w_uk)
        q.append(torch.cat((absorbed, query[..., nope:]), dim=-1).transpose(0, 1))
        layer_heads.append(seen["heads"][-queries:])
        layer_output.append(seen["output"][-queries:])
    step = CapturedStep(
        q=torch.cat(q),
        kv_cache=cache,
        page_table=table,
        cache_seqlens=torch.tensor(LENGTHS, dtype=torch.int32),
        cu_seqlens_q=torch.tensor((0, *QUERIES)).cumsum(0).to(torch.int32),
        sm_scale=layer.scaling,
        kv_lora_rank=rank,
    )
    save_step(
        path,
        step,
        provenance={
            "w_uv": w_uv,
            "w_o": layer.o_proj.weight.detach(),
            "heads": torch.cat(layer_heads),
            "output": torch.cat(layer_output),
        },
        metadata={"source": f"DeepseekV3Attention, transformers {transformers.__version__}, random weights, seed 0"},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    main(parser.parse_args().file)
