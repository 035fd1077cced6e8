"""A dense checkpoint as a mixture of experts that computes the same: every expert is a copy of the layer's MLP.

Gates that are renormalised sum to one, so any routing of equal experts gives the dense layer's output; the router is
random, and training drives the experts apart. Small real language models become small real MoE models this way. (Sparse
upcycling, arXiv 2212.05055; there experts start equal too, but gates do not sum to one and the output changes.)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rsi.trainer import ModelConfig
from rsi.trainer.checkpoint import write_whole
from rsi.trainer.qwen_moe import load_model, read_config

TARGETS = {"qwen3": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"), "qwen2": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM")}
"""Classes of the same attention, by the dense model's type."""


@dataclass(frozen=True)
class UpcycleConfig:
    experts: int = 8
    top_k: int = 2
    """Experts a token goes through."""
    every: int = 1
    """Layers from one mixture to the next; the others stay dense."""
    router_std: float = 0.02
    seed: int = 0
    """Of the router's weights."""

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.experts or self.every < 1:
            raise ValueError(
                f"{self.experts} experts, top {self.top_k}, every {self.every} layers: use 1 <= top-k <= experts and "
                "every >= 1"
            )


def upcycle(source: Path, target: Path, config: UpcycleConfig = UpcycleConfig()) -> int:
    """Write `target`, a model directory with `source`'s tokenizer; returns its number of parameters. Raises ValueError
    for a model that is not a dense Qwen2 or Qwen3."""
    stored = read_config(ModelConfig(str(source))).dtype or torch.float32
    dense, tokenizer = load_model(ModelConfig(str(source)))
    module = mixture_of(dense, config).to(stored)

    def write(path: Path) -> None:
        module.save_pretrained(path)
        tokenizer.save_pretrained(path)

    write_whole(target, write)
    return sum(p.numel() for p in module.parameters())


def mixture_of(dense: Any, config: UpcycleConfig) -> Any:
    """The mixture whose logits are `dense`'s, float32, in eval mode."""
    import transformers

    kind = dense.config.model_type
    if kind not in TARGETS:
        raise ValueError(f"a {kind} model cannot be upcycled; give a dense {' or '.join(TARGETS)} checkpoint")
    config_class, model_class = (getattr(transformers, name) for name in TARGETS[kind])
    module = model_class._from_config(config_class(**moe_fields(dense.config, config)), dtype=torch.float32)
    generator = torch.Generator().manual_seed(config.seed)
    given = dense.state_dict()
    module.load_state_dict(
        {name: initial(name, tensor, given, config, generator) for name, tensor in module.state_dict().items()}
    )
    return module.eval()


def moe_fields(dense: Any, config: UpcycleConfig) -> dict[str, Any]:
    """The dense config with its mixtures: layers every - 1, 2 * every - 1, and so on."""
    fields = {key: value for key, value in dense.to_dict().items() if key not in ("model_type", "architectures")}
    is_moe = [(layer + 1) % config.every == 0 for layer in range(dense.num_hidden_layers)]
    qwen2 = {"shared_expert_intermediate_size": 1, "qkv_bias": True} if dense.model_type == "qwen2" else {}
    mixture = {
        "num_experts": config.experts,
        "num_experts_per_tok": config.top_k,
        "norm_topk_prob": True,
        "moe_intermediate_size": dense.intermediate_size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, moe in enumerate(is_moe) if not moe],
        "router_aux_loss_coef": 0.0,
    }
    return fields | qwen2 | mixture


def initial(
    name: str, tensor: Tensor, given: dict[str, Tensor], config: UpcycleConfig, generator: torch.Generator
) -> Tensor:
    """What a tensor of the mixture begins with."""
    if name in given:
        return given[name].float()
    block, _, part = name.rpartition(".mlp.")
    mlp = {kind: given[f"{block}.mlp.{kind}_proj.weight"].float() for kind in ("gate", "up", "down")}
    match part:
        case "experts.gate_up_proj":
            return torch.cat([mlp["gate"], mlp["up"]]).expand_as(tensor).clone()
        case "experts.down_proj":
            return mlp["down"].expand_as(tensor).clone()
        case "gate.weight":
            return torch.randn(tensor.shape, generator=generator) * config.router_std
        case _:  # Qwen2's shared expert: one unit that adds nothing
            return torch.zeros_like(tensor)
