"""install(model): Qwen3-MoE and Qwen3.5-MoE of transformers on these kernels, beside the model's own eager loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rsi_kernels import experts as experts_module
from rsi_kernels.install import install, uninstall
from tests.kernels.checks import DEVICE, rel


def qwen3(**changes: Any) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    options: Any = {"head_dim": 8} | changes
    config: Any = Qwen3MoeConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, initializer_range=0.2,
        **options,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = Qwen3MoeForCausalLM._from_config(config, experts_implementation="eager")
    return model.to(DEVICE)


def qwen3_5() -> Any:
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    config: Any = Qwen3_5MoeTextConfig(  # pyright: ignore[reportCallIssue]
        vocab_size=60, hidden_size=32, moe_intermediate_size=24, shared_expert_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=8,
        num_experts_per_tok=2, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"], initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = Qwen3_5MoeForCausalLM._from_config(config, experts_implementation="eager")
    return model.to(DEVICE)


def outcome(model: Any) -> dict[str, torch.Tensor]:
    """Logits and every parameter's gradient for one batch."""
    model.zero_grad()
    logits = model(torch.arange(40, device=DEVICE).view(2, 20)).logits
    (logits.logsumexp(-1).sum() - logits[..., 3].sum()).backward()
    return {"logits": logits.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("make", [qwen3, qwen3_5])
def test_the_model_gives_the_same_logits_and_gradients(make):
    model = make()
    eager = outcome(model)
    assert install(model) == 2
    ours = outcome(model)
    assert not all(torch.equal(ours[name], eager[name]) for name in eager), "nothing was installed"
    for name, expected in eager.items():
        # float32 throughout, two layers; sums in another order
        assert rel(ours[name], expected) < 2e-5, name


def test_uninstalling_brings_back_every_bit():
    model = qwen3()
    model.set_experts_implementation("grouped_mm")
    before = outcome(model)
    install(model)
    outcome(model)
    uninstall(model)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), outcome(model).values(), strict=True))


def test_a_router_that_does_not_renormalise_is_obeyed():
    model = qwen3(norm_topk_prob=False)
    eager = outcome(model)["logits"]
    install(model)
    assert rel(outcome(model)["logits"], eager) < 2e-5


def test_a_fault_in_the_experts_reaches_the_logits(monkeypatch: pytest.MonkeyPatch):
    model = qwen3()
    eager = outcome(model)["logits"]
    install(model)
    plain = experts_module.grouped_mm
    monkeypatch.setattr(experts_module, "grouped_mm", lambda *args: plain(*args) * 1.001)
    assert rel(outcome(model)["logits"], eager) > 2e-5


def test_a_saved_model_does_not_carry_the_kernels(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    model = qwen3()
    install(model)
    model.save_pretrained(tmp_path)
    assert "rsi_" not in (tmp_path / "config.json").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._experts_implementation == "grouped_mm"


def test_dense_models_are_left_alone():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config: Any = Qwen3Config(
        vocab_size=60, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    assert install(Qwen3ForCausalLM(config)) == 0


@pytest.mark.parametrize(
    "change", [{"has_bias": True}, {"is_transposed": True}, {"is_concatenated": False}, {"has_gate": False}]
)
def test_experts_laid_out_otherwise_are_refused_before_anything_changes(change: dict[str, bool]):
    model = qwen3()
    for name, value in change.items():
        setattr(model.model.layers[1].mlp.experts, name, value)
    with pytest.raises(ValueError, match="model.kernels=off"):
        install(model)
    assert model.config._experts_implementation == "eager"


def test_experts_with_another_activation_are_refused():
    model = qwen3(hidden_act="gelu")
    with pytest.raises(ValueError, match="hidden_act"):
        install(model)
