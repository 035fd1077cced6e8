"""A random tiny Qwen3-MoE for the engine's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

VOCAB = 300


@pytest.fixture
def make_model() -> Callable[..., Any]:
    """Build a module of transformers by class name, always with the same weights.

    initializer_range 0.08: the default 0.02 gives near-uniform logits, which hide errors in log-probabilities.
    """

    def make(kind: str = "Qwen3Moe", dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
        import transformers

        fields: dict[str, Any] = dict(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            initializer_range=0.08,
        )
        if kind.startswith("Qwen3"):
            fields["head_dim"] = 16
        if kind.endswith("Moe"):
            fields |= dict(moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True)
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**(fields | overrides))
        return getattr(transformers, f"{kind}ForCausalLM")._from_config(config, dtype=dtype).eval()

    return make
