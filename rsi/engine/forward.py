"""Forward passes of the native engine over slots of one key-value cache.

`HfForward` calls the Hugging Face module of any Qwen with full attention: the module writes and reads our slots through
transformers' Cache interface. `LeanForward` is the same mathematics for Qwen3-MoE in float32 on a CPU, where the
module's own overhead costs more than its arithmetic: tokens lie flat (nothing is padded), query, key and value are one
product, and few experts are two products over all of them with zero weights for those not chosen. Both are tested to
agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

PADDED_TOKENS = 4096
"""Of one prefill through HfForward; bounds its [rows, 1, tokens, length] mask and its activations."""

DENSE_EXPERT_TOKENS = 128
"""Up to here all experts for all tokens beat sorting tokens by expert (h128, 8 experts: 286 against 355 us at 64)."""

DENSE_EXPERT_RATIO = 8
"""... as long as there are at most this many experts for each one that is chosen."""


@dataclass(frozen=True)
class Chunk:
    """Tokens to feed to the cache slot `row`, whose first `start` positions are filled."""

    row: int
    start: int
    tokens: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Slots:
    """Keys and values of `num_rows` sequences. Positions beyond a sequence's length hold leftovers, always finite."""

    def __init__(self, config: Any, num_rows: int, max_len: int, dtype: torch.dtype, device: torch.device):
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, num_rows, config.num_key_value_heads, max_len, head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        """[layers, rows, kv heads, max_len, head_dim]."""

    def swap(self, a: int, b: int, length: int) -> None:
        """Exchange two rows' first `length` positions."""
        for buffer in (self.keys, self.values):
            held = buffer[:, a, :, :length].clone()
            buffer[:, a, :, :length] = buffer[:, b, :, :length]
            buffer[:, b, :, :length] = held

    def copy(self, source: int, target: int, length: int) -> None:
        for buffer in (self.keys, self.values):
            buffer[:, target, :, :length] = buffer[:, source, :, :length]

    def clear(self) -> None:
        """Zero all: after weights that gave NaN, a masked NaN would still poison a sum."""
        self.keys.zero_()
        self.values.zero_()


def rows_of(buffer: Tensor, rows: list[int], length: int) -> Tensor:
    """buffer [R, heads, max_len, D] -> [len(rows), heads, length, D]; a view where the rows are consecutive."""
    first = rows[0]
    if rows == list(range(first, first + len(rows))):
        return buffer[first : first + len(rows), :, :length]
    return buffer[:, :, :length].index_select(0, torch.tensor(rows, device=buffer.device))


class HfForward:
    """Through the module's own forward, one padded batch for single tokens and some for longer chunks."""

    def __init__(self, module: Any, slots: Slots):
        self._module, self._slots = module, slots
        self._layers = [_SlotLayer(slots, layer) for layer in range(module.config.num_hidden_layers)]
        self._cache = Cache(layers=list(self._layers))
        self._device = slots.keys.device

    def refresh(self) -> None:
        """Nothing is derived from the weights."""

    def __call__(self, chunks: Sequence[Chunk]) -> Tensor:
        """Feed all chunks; float32 logits [len(chunks), V] after the last token of each."""
        hidden: list[Tensor] = [torch.empty(0)] * len(chunks)
        for batch in _padded_batches(chunks):
            for i, row_H in zip(batch, self._run([chunks[i] for i in batch]), strict=True):
                hidden[i] = row_H
        return F.linear(torch.stack(hidden).float(), self._module.get_output_embeddings().weight.float())

    def _run(self, chunks: list[Chunk]) -> Tensor:
        """[len(chunks), H]: the hidden state of each chunk's last token."""
        size = max(len(chunk.tokens) for chunk in chunks)
        ids = torch.tensor(
            [[*chunk.tokens, *[0] * (size - len(chunk.tokens))] for chunk in chunks], device=self._device
        )
        starts = torch.tensor([chunk.start for chunk in chunks], device=self._device)
        lengths = torch.tensor([len(chunk.tokens) for chunk in chunks], device=self._device)
        steps = torch.arange(size, device=self._device)
        positions = starts[:, None] + steps
        length = max(chunk.end for chunk in chunks)
        mask = torch.arange(length, device=self._device) <= positions[:, None, :, None]  # [rows, 1, size, length]
        plan = _Plan([chunk.row for chunk in chunks], positions, steps < lengths[:, None], length)
        for layer in self._layers:
            layer.plan = plan
        config = self._module.config
        configured = config._attn_implementation
        config._attn_implementation = "sdpa"  # the one implementation that takes this mask on every device
        try:
            output = self._module.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=self._cache, use_cache=True
            )
        finally:
            config._attn_implementation = configured
        return output.last_hidden_state[torch.arange(len(chunks), device=self._device), lengths - 1]


def _padded_batches(chunks: Sequence[Chunk]) -> list[list[int]]:
    """Indices of chunks to run together: all single tokens, then the others by falling length under PADDED_TOKENS."""
    singles = [i for i, chunk in enumerate(chunks) if len(chunk.tokens) == 1]
    batches = [singles] if singles else []
    current: list[int] = []
    others = [i for i, chunk in enumerate(chunks) if len(chunk.tokens) > 1]
    for i in sorted(others, key=lambda i: -len(chunks[i].tokens)):
        if current and (len(current) + 1) * len(chunks[current[0]].tokens) > PADDED_TOKENS:
            batches.append(current)
            current = []
        current.append(i)
    return [*batches, current] if current else batches


@dataclass(frozen=True)
class _Plan:
    """Where one padded forward writes: tokens [rows, size] at `positions` where `valid`; it reads `length`
    positions."""

    rows: list[int]
    positions: Tensor
    valid: Tensor
    length: int


class _SlotLayer(CacheLayerMixin):
    """One layer of Slots behind transformers' interface."""

    plan: _Plan

    def __init__(self, slots: Slots, layer: int):
        super().__init__()
        self.keys, self.values = slots.keys[layer], slots.values[layer]
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The slots exist from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """key_states, value_states: [rows, kv heads, size, D]. Returns all that the rows hold, up to the plan's
        length."""
        assert self.keys is not None and self.values is not None
        plan = self.plan
        rows = torch.tensor(plan.rows, device=self.keys.device)[:, None].expand_as(plan.positions)[plan.valid]
        positions = plan.positions[plan.valid]
        self.keys[rows, :, positions] = key_states.transpose(1, 2)[plan.valid]
        self.values[rows, :, positions] = value_states.transpose(1, 2)[plan.valid]
        return rows_of(self.keys, plan.rows, plan.length), rows_of(self.values, plan.rows, plan.length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.plan.length, 0

    def get_seq_length(self) -> int:
        """The rows differ in length; positions and mask are always given instead."""
        return 0

    def get_max_length(self) -> int:
        assert self.keys is not None
        return self.keys.shape[2]


@dataclass(frozen=True)
class _LeanLayer:
    """Weights of one decoder layer, laid out for few large products. All but `wqkv` and `down` are views."""

    wqkv: Tensor
    """[(heads + 2 kv heads) * D, H]."""
    qk_norm: Tensor
    """[heads + kv heads, D]: the query norm's weight for each head, then the key norm's."""
    wo: Tensor
    norm_in: Tensor
    norm_post: Tensor
    router: Tensor
    gate_up: Tensor
    """[E * 2I, H]."""
    down: Tensor
    """[H, E * I]."""
    mlp: Any
    """The module's own block, for many tokens."""


class LeanForward:
    """Flat tokens through Qwen3-MoE. `fits` says for which modules; others take HfForward."""

    @staticmethod
    def fits(module: Any) -> bool:
        config, weight = module.config, module.get_input_embeddings().weight
        return (
            config.model_type == "qwen3_moe"
            and weight.dtype == torch.float32
            and weight.device.type == "cpu"
            and not config.attention_bias
            and config.hidden_act == "silu"
            and not config.mlp_only_layers
            and config.decoder_sparse_step == 1
            and config.num_experts <= DENSE_EXPERT_RATIO * config.num_experts_per_tok
        )

    def __init__(self, module: Any, slots: Slots):
        self._module, self._slots = module, slots
        config = module.config
        self._heads, self._kv_heads, self._dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self._eps, self._top_k, self._renormalise = (
            config.rms_norm_eps,
            config.num_experts_per_tok,
            config.norm_topk_prob,
        )
        max_len = slots.keys.shape[3]
        with torch.no_grad():
            cos, sin = module.model.rotary_emb(torch.zeros(1), torch.arange(max_len)[None])
        half = self._dim // 2
        self._cos = cos[0]
        self._sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)  # the sign of rotate_half, taken in once
        self._index = torch.arange(max_len)
        self._layers: list[_LeanLayer] = []
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Lay the weights out anew; call it whenever they have changed."""
        self._layers = [self._lay_out(layer) for layer in self._module.model.layers]

    def _lay_out(self, layer: Any) -> _LeanLayer:
        attention, experts = layer.self_attn, layer.mlp.experts
        num_experts, twice_inner, hidden = experts.gate_up_proj.shape
        return _LeanLayer(
            wqkv=torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]),
            qk_norm=torch.cat(
                [
                    attention.q_norm.weight.expand(self._heads, self._dim),
                    attention.k_norm.weight.expand(self._kv_heads, self._dim),
                ]
            ),
            wo=attention.o_proj.weight.detach(),
            norm_in=layer.input_layernorm.weight.detach(),
            norm_post=layer.post_attention_layernorm.weight.detach(),
            router=layer.mlp.gate.weight.detach(),
            gate_up=experts.gate_up_proj.detach().view(num_experts * twice_inner, hidden),
            down=experts.down_proj.detach().transpose(0, 1).reshape(hidden, -1).contiguous(),
            mlp=layer.mlp,
        )

    def __call__(self, chunks: Sequence[Chunk]) -> Tensor:
        """Feed all chunks, single tokens first; float32 logits [len(chunks), V] after the last token of each."""
        order = sorted(range(len(chunks)), key=lambda i: len(chunks[i].tokens) > 1)
        plan = _FlatPlan.of([chunks[i] for i in order], self._index)
        x_TH = F.embedding(plan.ids, self._module.model.embed_tokens.weight)
        cos, sin = self._cos[plan.positions, None], self._sin[plan.positions, None]
        for layer, keys, values in zip(self._layers, self._slots.keys, self._slots.values, strict=True):
            x_TH = x_TH + self._attention(layer, keys, values, x_TH, cos, sin, plan)
            h_TH = F.rms_norm(x_TH, layer.norm_post.shape, layer.norm_post, self._eps)
            x_TH = x_TH + self._experts(layer, h_TH)
        norm = self._module.model.norm.weight
        logits = F.linear(F.rms_norm(x_TH[plan.last], norm.shape, norm, self._eps), self._module.lm_head.weight)
        if order == list(range(len(chunks))):
            return logits
        back = torch.empty(len(order), dtype=torch.int64)
        back[torch.tensor(order)] = torch.arange(len(order))
        return logits[back]

    def _attention(
        self, layer: _LeanLayer, keys: Tensor, values: Tensor, x_TH: Tensor, cos: Tensor, sin: Tensor, plan: _FlatPlan
    ) -> Tensor:
        """Writes the tokens' keys and values (keys, values: [rows, kv heads, max_len, D]) and attends; [T, H]."""
        heads, kv_heads, dim = self._heads, self._kv_heads, self._dim
        h_TH = F.rms_norm(x_TH, layer.norm_in.shape, layer.norm_in, self._eps)
        qkv = F.linear(h_TH, layer.wqkv).view(-1, heads + 2 * kv_heads, dim)
        qk = F.rms_norm(qkv[:, : heads + kv_heads], (dim,), None, self._eps) * layer.qk_norm
        qk = torch.addcmul(qk * cos, qk.roll(dim // 2, -1), sin)
        keys[plan.rows, :, plan.positions] = qk[:, heads:]
        values[plan.rows, :, plan.positions] = qkv[:, heads + kv_heads :]
        outs = []
        if plan.single_rows:
            n = len(plan.single_rows)
            # the query heads of one kv head lie in the place of query positions, so that no key is repeated
            q = qk[:n, :heads].reshape(n, kv_heads, heads // kv_heads, dim)
            k, v = (rows_of(buffer, plan.single_rows, plan.single_length) for buffer in (keys, values))
            outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=plan.single_mask).reshape(n, heads * dim))
        for chunk, begin, mask in plan.long:
            q = qk[None, begin : begin + len(chunk.tokens), :heads].transpose(1, 2)
            k, v = (buffer[None, chunk.row, :, : chunk.end] for buffer in (keys, values))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
            outs.append(out[0].transpose(0, 1).reshape(-1, heads * dim))
        return F.linear(outs[0] if len(outs) == 1 else torch.cat(outs), layer.wo)

    def _experts(self, layer: _LeanLayer, h_TH: Tensor) -> Tensor:
        if len(h_TH) > DENSE_EXPERT_TOKENS:
            return layer.mlp(h_TH[None])[0]
        probs = F.linear(h_TH, layer.router).softmax(-1)
        gates, chosen = probs.topk(self._top_k, -1)
        if self._renormalise:
            gates = gates / gates.sum(-1, keepdim=True)
        combine_TE = torch.zeros_like(probs).scatter_(1, chosen, gates)
        gate, up = F.linear(h_TH, layer.gate_up).view(len(h_TH), probs.shape[1], 2, -1).unbind(2)
        inner_TEI = F.silu(gate).mul_(up).mul_(combine_TE[..., None])
        return F.linear(inner_TEI.flatten(1), layer.down)


@dataclass(frozen=True)
class _FlatPlan:
    """Chunks laid end to end, T tokens, the single ones first."""

    ids: Tensor
    rows: Tensor
    positions: Tensor
    last: Tensor
    """[chunks]: where each chunk's last token lies."""
    single_rows: list[int]
    single_length: int
    single_mask: Tensor | None
    """bool [singles, 1, 1, single_length]."""
    long: list[tuple[Chunk, int, Tensor | None]]
    """(chunk, where it begins, its mask [tokens, end] or None for plain causal)."""

    @staticmethod
    def of(chunks: list[Chunk], index: Tensor) -> _FlatPlan:
        """index: arange(max_len)."""
        ids: list[int] = []
        rows: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        long: list[tuple[Chunk, int, Tensor | None]] = []
        singles = [chunk for chunk in chunks if len(chunk.tokens) == 1]
        for chunk in chunks:
            if len(chunk.tokens) > 1:
                mask = index[: chunk.end] <= index[chunk.start : chunk.end, None] if chunk.start else None
                long.append((chunk, len(ids), mask))
            ids += chunk.tokens
            rows += [chunk.row] * len(chunk.tokens)
            positions += range(chunk.start, chunk.end)
            last.append(len(ids) - 1)
        positions_T = torch.tensor(positions)
        length = max((chunk.end for chunk in singles), default=0)
        mask = index[:length] <= positions_T[: len(singles), None, None, None] if singles else None
        return _FlatPlan(
            torch.tensor(ids),
            torch.tensor(rows),
            positions_T,
            torch.tensor(last),
            [chunk.row for chunk in singles],
            length,
            mask,
            long,
        )
