"""A dense model as a mixture of experts with the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rsi.trainer import ModelConfig
from rsi.trainer.qwen_moe import load_model
from rsi.trainer.upcycle import UpcycleConfig, mixture_of, upcycle
from tests.trainer.models import VOCAB, save_tokenizer, tiny_model


def tiny_qwen2() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.08,
    )
    model: Any = Qwen2ForCausalLM._from_config(config, dtype=torch.float32).eval()
    for layer in model.model.layers:  # transformers begins biases at 0, which would hide that they are carried over
        torch.nn.init.normal_(layer.self_attn.q_proj.bias)
    return model


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (3, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("make", [lambda: tiny_model("qwen3"), tiny_qwen2], ids=["qwen3", "qwen2"])
@torch.no_grad()
def test_logits_are_the_dense_models_at_the_start(make: Any, every: int, tmp_path: Path):
    dense = make()
    dense.save_pretrained(tmp_path / "dense")
    save_tokenizer(tmp_path / "dense")
    size = upcycle(tmp_path / "dense", tmp_path / "moe", UpcycleConfig(experts=4, top_k=2, every=every))
    moe, tokenizer = load_model(ModelConfig(str(tmp_path / "moe")))
    mixtures = [hasattr(layer.mlp, "experts") for layer in moe.model.layers]
    assert mixtures == [every == 1, True] and type(moe).__name__.endswith("MoeForCausalLM")
    expected = dense(tokens()).logits
    # gates sum to one within float32's rounding, logits reach 3
    torch.testing.assert_close(moe(tokens()).logits, expected, atol=1e-5, rtol=0)
    assert size > 1.2 * sum(p.numel() for p in dense.parameters()) and len(tokenizer) <= VOCAB


def test_experts_part_once_they_train():
    moe = mixture_of(tiny_model("qwen3"), UpcycleConfig(experts=4))
    moe(tokens()).logits.log_softmax(-1)[..., 0].sum().backward()
    grads = moe.model.layers[0].mlp.experts.down_proj.grad
    assert moe.model.layers[0].mlp.gate.weight.grad is not None
    assert all(grads[i].any() and not torch.equal(grads[0], grads[i]) for i in range(1, 4))


def test_what_cannot_be_upcycled_is_refused_by_name():
    with pytest.raises(ValueError, match="a qwen3_moe model cannot be upcycled; give a dense qwen3 or qwen2"):
        mixture_of(tiny_model("qwen3_moe"), UpcycleConfig())
    with pytest.raises(ValueError, match="use 1 <= top-k <= experts"):
        UpcycleConfig(experts=2, top_k=4)
