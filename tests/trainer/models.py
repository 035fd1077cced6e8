"""Tiny random models of every architecture that we train, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

Kind = Literal["qwen3_moe", "qwen3", "qwen3_5_moe"]
KINDS: tuple[Kind, ...] = ("qwen3_moe", "qwen3", "qwen3_5_moe")
VOCAB = 270


def tiny_model(kind: Kind, seed: int = 0, **overrides: Any) -> Any:
    """In eval mode. initializer_range 0.08: the default gives near-uniform logits, which hide errors."""
    import transformers

    fields: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.08,
    )
    if kind.endswith("moe"):
        fields |= dict(moe_intermediate_size=24, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True)
    if kind == "qwen3_5_moe":
        fields |= dict(
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            shared_expert_intermediate_size=24,
        )
    config_class, model_class = {
        "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
        "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
    }[kind]
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**(fields | overrides))
    return getattr(transformers, model_class)._from_config(config, dtype=torch.float32).eval()


def save_tokenizer(directory: Path) -> None:
    """One token a byte, and two of Qwen's markers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.save_pretrained(directory)
