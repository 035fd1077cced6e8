"""A random tiny Qwen3-MoE on disk, with a tokenizer, for the trainer's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer.models import save_tokenizer

VOCAB = 270


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """float32 safetensors and a byte-level tokenizer. Read only: tests that change it make a copy."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    directory = tmp_path_factory.mktemp("model")
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,  # pyright: ignore[reportCallIssue]
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.08,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM._from_config(config, dtype=torch.float32).save_pretrained(directory)
    save_tokenizer(directory)
    return directory
