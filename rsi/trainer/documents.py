"""Documents of one packed row, kept apart in everything that mixes tokens: attention and gated DeltaNet.

Attention runs document by document (torch's fused causal kernel, no mask of row by row), or through flash-attention's
own variable-length kernel. A gated DeltaNet layer has a convolution and a recurrent state, and both leak: with the fast
kernels (fla and causal-conv1d) each is told the bounds in its own way; without, the layer runs on documents as rows of
their own, in groups of like length. `check_apart` tries that out before a model may train packed.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ATTENTION = "rsi_documents"
"""Our name in transformers' table of attention implementations."""


def keep_documents_apart(model: Any) -> None:
    """Let the model's forward take `document_kwargs`. Without them it computes what it did before."""
    if model.config._attn_implementation != "flash_attention_2":
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
        model.config._attn_implementation = ATTENTION
    for module in model.modules():
        if type(module).__name__.endswith("GatedDeltaNet"):
            module.forward = functools.partial(_delta_net, module.forward)


def document_kwargs(bounds: Sequence[int], device: torch.device) -> dict[str, Any]:
    """What a packed forward is called with besides its tokens; bounds as in Microbatch."""
    lengths = [end - start for start, end in zip(bounds[:-1], bounds[1:], strict=True)]
    positions = torch.cat([torch.arange(length) for length in lengths])
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32).to(device)
    return {
        "position_ids": positions[None].to(device),
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "document_bounds": tuple(bounds),
    }


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    document_bounds: tuple[int, ...] = (),
    **_: Any,
) -> tuple[Tensor, None]:
    """query [R, heads, S, D], key and value [R, kv heads, S, D]; returns ([R, S, heads, D], None) for transformers.

    transformers makes no mask for an implementation that it does not know: rows are causal, documents within.
    """
    if attention_mask is not None:
        raise ValueError(f"{ATTENTION} is causal within documents and takes no mask; use model.attention=sdpa unpacked")
    bounds = document_bounds or (0, query.shape[2])
    outs = [
        F.scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, start:end],
            value[:, :, start:end],
            is_causal=True,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        for start, end in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
    return out.transpose(1, 2).contiguous(), None


def _delta_net(
    forward: Any,
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    document_bounds: tuple[int, ...] = (),
    **kwargs: Any,
) -> Tensor:
    if len(document_bounds) <= 2:
        for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
            kwargs.pop(name, None)
        return forward(hidden_states, cache_params, attention_mask, **kwargs)
    if _has_fast_kernels(hidden_states.device):
        seq_idx = kwargs["cu_seq_lens_q"].new_zeros(hidden_states.shape[1])
        seq_idx[list(document_bounds[1:-1])] = 1
        return forward(hidden_states, None, None, seq_idx=seq_idx.cumsum(0, dtype=torch.int32)[None], **kwargs)
    return _by_length(lambda rows: forward(rows, None, None), hidden_states, document_bounds)


def _has_fast_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and all(importlib.util.find_spec(name) for name in ("fla", "causal_conv1d"))


def _by_length(forward: Any, hidden: Tensor, bounds: tuple[int, ...]) -> Tensor:
    """hidden [1, T, H] to the same shape, `forward` applied to documents as rows.

    Those of one group have lengths within a factor of two; what a causal layer makes of the padding is dropped.
    """
    groups: dict[int, list[tuple[int, int]]] = {}
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        groups.setdefault((end - start).bit_length(), []).append((start, end))
    positions, outs = [], []
    for members in groups.values():
        starts = torch.tensor([start for start, _ in members], device=hidden.device)
        lengths = torch.tensor([end - start for start, end in members], device=hidden.device)
        steps = torch.arange(max(end - start for start, end in members), device=hidden.device)
        inside = steps < lengths[:, None]
        at = starts[:, None] + steps.minimum(lengths[:, None] - 1)
        outs.append(forward(hidden[0][at])[inside])
        positions.append(at[inside])
    back = torch.empty(hidden.shape[1], dtype=torch.int64, device=hidden.device)
    back[torch.cat(positions)] = torch.arange(hidden.shape[1], device=hidden.device)
    return torch.cat(outs)[back][None]


@torch.no_grad()
def check_apart(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ValueError if the gated DeltaNet kernels of this machine let packed documents leak into each other.

    A layer with random weights, of the model's own class and size, sees one document behind two different others.
    Which kernels are installed decides how bounds are handed over, and a version that ignores them trains on leaked
    text without a sign. Nothing to do for a model without such layers.
    """
    found = next((m for m in model.modules() if type(m).__name__.endswith("GatedDeltaNet")), None)
    if found is None:
        return
    layer = type(found)(model.config, found.layer_idx).to(device, dtype)  # pyright: ignore[reportCallIssue, reportArgumentType]
    generator = torch.Generator().manual_seed(0)
    same = torch.randn(1, 70, model.config.hidden_size, generator=generator)
    outs = []
    for _ in range(2):
        other = torch.randn(1, 12, model.config.hidden_size, generator=generator)
        hidden = torch.cat([other, same], dim=1).to(device, dtype)
        documents = document_kwargs((0, 12, 82), device)
        del documents["position_ids"]
        outs.append(_delta_net(layer.forward, hidden, **documents)[0, 12:].float())
    apart = (outs[0] - outs[1]).abs().max()
    # the same rows through the same kernels: no more than bfloat16's rounding, while a leak is of the size of the rows
    if not apart <= 0.01 * outs[0].abs().max():
        raise ValueError(
            f"packed documents leak into each other in {type(found).__name__} (by {float(apart):.3g} of "
            f"{float(outs[0].abs().max()):.3g}): the kernels on this machine ignore document bounds; set "
            "trainer.layout=padded, or install a flash-linear-attention and a causal-conv1d that take them"
        )
