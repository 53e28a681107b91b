"""Write a tiny random checkpoint of the DeepSeek-V3 architecture, with a tokenizer, that vLLM can serve on a CPU.

    python scripts/make_tiny_deepseek.py DIRECTORY [--seed N]

Two dense layers, hidden size 256, 4 heads, the latent sizes of the real models (kv_lora_rank 512,
qk_rope_head_dim 64), float32. Needs transformers. Words of its tokenizer are ``w0`` to ``w511``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedTokenizerFast

VOCAB = 512


def make(directory: Path, seed: int = 5) -> None:
    torch.manual_seed(seed)
    config = DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=0,
        # Greedy answers must not stop early: no word ends the text.
        eos_token_id=None,
        pad_token_id=None,
        # Well above the usual 0.02: attention must sway the next token, and logits must not be close.
        initializer_range=0.08,
        dtype="float32",
    )
    DeepseekV3ForCausalLM(config).eval().save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=5)
    arguments = parser.parse_args()
    make(arguments.directory, arguments.seed)
