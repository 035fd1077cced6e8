"""Loading: what is set on purpose, and what is refused with its mend."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rsi.trainer import ModelConfig
from rsi.trainer.qwen_moe import load_model, route_in_float32


@pytest.fixture
def broken(model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir, tmp_path / "model"))


@pytest.mark.parametrize(("kernels", "experts"), [("auto", "rsi_auto"), ("off", "grouped_mm")])
def test_experts_are_grouped_and_the_auxiliary_loss_is_off(model_dir: Path, kernels: Any, experts: str):
    module, tokenizer = load_model(ModelConfig(str(model_dir), kernels=kernels))
    assert module.config._experts_implementation == experts
    assert module.config._attn_implementation == "sdpa"
    assert module.config.output_router_logits is False
    assert module.config.router_aux_loss_coef == module.router_aux_loss_coef == 0
    assert module.dtype == torch.float32 and not module.training
    assert tokenizer.eos_token == "<|im_end|>"


def test_float32_routing_changes_nothing_in_float32(model_dir: Path):
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa")
    without, _ = load_model(ModelConfig(str(model_dir), kernels="off"))
    ours, _ = load_model(ModelConfig(str(model_dir)))
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, without(ids).logits)
        # each token's experts are summed in another order: logits of ~1 differ by a few roundings
        torch.testing.assert_close(ours(ids).logits, without(ids).logits, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("kernels", "gate_dtype"), [("auto", torch.float32), ("off", torch.bfloat16)])
def test_routers_of_bfloat16_models_compute_in_float32(model_dir: Path, kernels: Any, gate_dtype: torch.dtype):
    """Hidden (1, 2^-8, 0...) against rows (1, 1) and (1, 0): logits 1.0039 and 1, which tie in bfloat16."""
    module, _ = load_model(ModelConfig(str(model_dir), dtype="bfloat16", kernels=kernels))
    router = module.model.layers[0].mlp.gate
    with torch.no_grad():
        router.weight.zero_()
        router.weight[5, 0] = router.weight[5, 1] = router.weight[2, 0] = 1
    hidden = torch.zeros(1, 32, dtype=torch.bfloat16)
    hidden[0, 0], hidden[0, 1] = 1, 2**-8
    logits, gates, experts = router(hidden)
    assert logits.dtype == torch.float32 and gates.dtype == gate_dtype
    assert experts.tolist() == [[5, 2]]
    assert logits[0, 5].item() == 1 + 2**-8


def test_gradient_reaches_the_router(model_dir: Path):
    module, _ = load_model(ModelConfig(str(model_dir)))
    module(torch.arange(20)[None]).logits.logsumexp(-1).sum().backward()
    gradient = module.model.layers[0].mlp.gate.weight.grad
    assert gradient is not None and gradient.abs().sum() > 0


def test_dense_qwen_models_load_too(model_dir: Path, tmp_path: Path):
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=270, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(tmp_path)
    module, _ = load_model(ModelConfig(str(tmp_path)))
    assert type(module).__name__ == "Qwen3ForCausalLM"
    route_in_float32(module)  # finds no router


def remove(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).unlink()


def test_a_directory_without_a_tokenizer_is_refused(broken: Path):
    remove(broken, "tokenizer.json")
    with pytest.raises(ValueError, match=r"lacks a tokenizer \(tokenizer.json or vocab.json\); write them"):
        load_model(ModelConfig(str(broken)))


def test_all_that_is_missing_is_named_at_once(broken: Path):
    remove(broken, "config.json", "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks config.json .*, weights \(model.safetensors"):
        load_model(ModelConfig(str(broken)))


def test_weights_that_lack_a_tensor_are_refused(broken: Path):
    from safetensors.torch import load_file, save_file

    stored = load_file(broken / "model.safetensors")
    del stored["model.layers.1.mlp.gate.weight"]
    save_file(stored, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"lack 1 tensors of Qwen3MoeForCausalLM, among them model.layers.1.mlp.gate.weight"
    ):
        load_model(ModelConfig(str(broken)))


def test_a_tokenizer_larger_than_the_model_is_refused(broken: Path):
    tokenizer = json.loads((broken / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {f"word{i}": 300 + i for i in range(50)}
    (broken / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="do not belong together"):
        load_model(ModelConfig(str(broken)))


def test_other_families_are_refused(broken: Path):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(
        json.dumps(config | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )
    with pytest.raises(ValueError, match="is a llama model"):
        load_model(ModelConfig(str(broken)))


@pytest.mark.parametrize("path", ["", "./nowhere", "/nowhere/at/all", "~/model"])
def test_paths_that_lead_nowhere_are_refused(path: str):
    with pytest.raises(ValueError, match="model.path"):
        load_model(ModelConfig(path))


def test_flash_attention_without_its_package_names_the_pip_line(model_dir: Path):
    with pytest.raises(ValueError, match=r"pip install 'rsi\[gpu\]'|needs a GPU"):
        load_model(ModelConfig(str(model_dir), attention="flash_attention_2"))
