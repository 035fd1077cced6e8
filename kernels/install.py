"""Puts `route` and `experts` into a Qwen MoE model of transformers, by one call, and takes them out again.

The experts go in through transformers' own interface; the router has none, so each router module gets a forward. It
computes in float32 whatever the weights are: 4.01 and 4.00 tie in bfloat16.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from rsi_kernels.experts import experts
from rsi_kernels.impl import Impl
from rsi_kernels.permute import permute
from rsi_kernels.route import route

NAME = "rsi_{impl}"
"""Of the experts function in transformers' registry, one for each impl."""


def install(model: nn.Module, impl: Impl = "auto") -> int:
    """Returns the number of expert layers that now run on these kernels; 0 for a dense model, which is left alone.

    Raises ValueError for experts whose weights do not lie as Qwen3-MoE's and Qwen3.5-MoE's do ([E, 2I, H], gate rows
    first; SwiGLU; no bias), before anything is changed.
    """
    layers: list[Any] = [module for module in model.modules() if type(module).__name__.endswith("Experts")]
    for layer in layers:
        _check(layer)
    if not layers:
        return 0
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    name = NAME.format(impl=impl)
    ALL_EXPERTS_FUNCTIONS.register(name, functools.partial(_experts_forward, impl=impl))
    for layer in layers:
        layer.config._experts_implementation = name
    for router in _routers(model):
        router.forward = functools.partial(_router_forward, router, impl=impl)
    return len(layers)


def uninstall(model: nn.Module) -> None:
    """Back to transformers' grouped products and routers."""
    modules: list[Any] = list(model.modules())
    for module in modules:
        if type(module).__name__.endswith("Experts"):
            module.config._experts_implementation = "grouped_mm"
    for router in _routers(model):
        router.__dict__.pop("forward", None)


def _routers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


def _check(layer: Any) -> None:
    """Raises ValueError unless the layer is a SwiGLU over concatenated, untransposed, bias-free weights."""
    wanted = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    wrong = {name: getattr(layer, name, None) for name, value in wanted.items() if getattr(layer, name, None) != value}
    if getattr(layer.config, "hidden_act", None) != "silu":
        wrong["hidden_act"] = getattr(layer.config, "hidden_act", None)
    if wrong:
        raise ValueError(
            f"{type(layer).__name__} has {wrong}; these kernels want {wanted} and hidden_act silu. "
            "Leave the model on transformers' experts (model.kernels=off)"
        )


def _experts_forward(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor, *, impl: Impl) -> Tensor:
    """transformers' signature: hidden [T, H], ids [T, K], weights [T, K]; returns [T, H]."""
    perm, inv, offs = permute(ids, module.num_experts, impl=impl)
    return experts(hidden, module.gate_up_proj, module.down_proj, weights.float(), perm, inv, offs, impl=impl)


def _router_forward(router: Any, hidden: Tensor, *, impl: Impl) -> tuple[Tensor, Tensor, Tensor]:
    """hidden: [..., H]. Returns (logits float32 [T, E], gate weights float32 [T, K], expert ids int32 [T, K])."""
    logits = F.linear(hidden.reshape(-1, router.hidden_dim).float(), router.weight.float())
    renorm = getattr(router, "norm_topk_prob", True)  # Qwen3.5's router has no such field and always renormalises
    weights, ids, _, _ = route(logits, router.top_k, renorm=renorm, impl=impl)
    return logits, weights, ids
