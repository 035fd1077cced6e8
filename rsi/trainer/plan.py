"""Whether a model trains on a cluster: gigabytes a GPU, part by part, before anyone queues for it.

State follows from the number of parameters. Activations are counted for one layer's backward on top of one kept tensor
a layer; FACTOR, the one fitted number, covers the allocator's gaps and copies. Two published runs of Qwen3-30B-A3B on
8 x H200 (prime-rl, full recomputation, chunked head) are met within 5 %: 74.6 GiB at 16,384 tokens, 105.4 at 65,536.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from rsi.trainer import ModelConfig, TrainerConfig
from rsi_kernels.head import CHUNK_GPU

GB = 1e9
FACTOR = 1.4
"""Of activations: what prime-rl's 0.66 MB a token is to the 0.46 MB counted here."""
RUNTIME_GB = 3.0
"""CUDA context, NCCL buffers, kernels' workspaces."""
GPUS = {"H100": 84.9, "H200": 149.2, "A100": 84.9, "B200": 190.0}
"""Decimal GB that torch can have of a GPU (79, 139, 79, 177 GiB)."""
CLUSTERS = ("8xH200", "8xH100", "2x8xH100")

KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen/Qwen3-30B-A3B": (
        "qwen3_moe",
        dict(vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48)
        | dict(num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128)
        | dict(num_experts_per_tok=8, moe_intermediate_size=768, tie_word_embeddings=False),
    ),
    "Qwen/Qwen3.6-35B-A3B": (
        "qwen3_5_moe_text",
        dict(vocab_size=248320, hidden_size=2048, num_hidden_layers=40, num_attention_heads=16)
        | dict(num_key_value_heads=2, head_dim=256, num_experts=256, num_experts_per_tok=8)
        | dict(moe_intermediate_size=512, shared_expert_intermediate_size=512, linear_num_key_heads=16)
        | dict(linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128)
        | dict(linear_conv_kernel_dim=4, tie_word_embeddings=False),
    ),
}
"""config.json of the models that a plan is most often asked for, so that it needs no download."""


@dataclass(frozen=True)
class Shape:
    """What a plan must know of a model."""

    parameters: int
    layer: int
    """Parameters of the largest layer."""
    root: int
    """Parameters outside the layers: embeddings, head, last norm."""
    layers: int
    hidden: int
    vocab: int
    layer_activations: int
    """Elements a token that one layer's backward needs, without the layer's input."""


@dataclass(frozen=True)
class Memory:
    """Decimal GB on one GPU while it trains, at its peak."""

    weights: float
    """float32 masters, this rank's slice."""
    optimizer: float
    gradients: float
    gathered: float
    """The layers in use, in model.dtype, one prefetched, and their gradients on the way to their owners."""
    activations: float
    logits: float
    runtime: float
    host: float
    """Of the node's memory, all ranks together; no part of the total."""

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self)) - self.host


@dataclass(frozen=True)
class Cluster:
    nodes: int
    gpus: int
    """A node's."""
    kind: str

    @property
    def capacity_gb(self) -> float:
        return GPUS[self.kind]


def read_cluster(text: str) -> Cluster:
    """`8xH200`, `2x8xH100`: nodes (one if left out), GPUs a node, kind. Raises ValueError."""
    found = re.fullmatch(r"(?:(\d+)x)?(\d+)x([A-Z]\d+)", text)
    if not found or found[3] not in GPUS or not int(found[2]):
        raise ValueError(f"{text!r} is no cluster; write 8xH200 or 2x8xH100, of {', '.join(GPUS)}")
    return Cluster(int(found[1] or 1), int(found[2]), found[3])


def shape_of(path: str) -> Shape:
    """Of a model directory or hub name; parameters are counted on the module itself, without memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if path in KNOWN:
        kind, values = KNOWN[path]
        config = AutoConfig.for_model(kind, **values)
    else:
        config = AutoConfig.from_pretrained(path)
        config = getattr(config, "text_config", config)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    total = sum(p.numel() for p in module.parameters())
    layers = [sum(p.numel() for p in layer.parameters()) for layer in module.model.layers]
    return Shape(
        parameters=total,
        layer=max(layers),
        root=total - sum(layers),
        layers=len(layers),
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        layer_activations=max(_mixer(config), _linear_mixer(config)) + _mlp(config) + 2 * config.hidden_size,
    )


def plan(shape: Shape, model: ModelConfig, trainer: TrainerConfig, cluster: Cluster) -> Memory:
    """The peak of one step of the sharded trainer."""
    world = cluster.nodes * cluster.gpus
    width = 2 if model.dtype == "bfloat16" else 4
    own = shape.parameters / world / GB
    on_gpu = 0.0 if trainer.offload else 1.0
    kept = shape.layers * shape.hidden if trainer.checkpoint_activations else shape.layers * shape.layer_activations
    elements = kept + 2 * shape.layer_activations  # a layer's own and their gradients
    return Memory(
        weights=4 * own * on_gpu,
        optimizer=8 * own * on_gpu,
        gradients=4 * own * on_gpu,
        gathered=(2 * width * shape.layer + width * shape.root + 4 * shape.layer) / GB,
        activations=FACTOR * width * elements * trainer.microbatch_tokens / GB,
        logits=(4 + width) * min(CHUNK_GPU, trainer.microbatch_tokens) * shape.vocab / GB,
        runtime=RUNTIME_GB,
        host=(1.0 - on_gpu) * 16 * own * cluster.gpus,
    )


def mend(shape: Shape, model: ModelConfig, trainer: TrainerConfig, cluster: Cluster) -> str:
    """What makes a plan fit that does not, in words. A document longer than the tokens it names is run alone, and then
    needs its own length."""

    def fits(changed: TrainerConfig) -> bool:
        return plan(shape, model, changed, cluster).total <= cluster.capacity_gb

    if not trainer.checkpoint_activations and fits(replace(trainer, checkpoint_activations=True)):
        return "trainer.checkpoint_activations=true"
    lean = replace(trainer, checkpoint_activations=True)
    per_token = plan(shape, model, lean, cluster).activations / trainer.microbatch_tokens
    for changed, words, least in ((lean, "", 8192), (replace(lean, offload=True), "trainer.offload=true and ", 1024)):
        spare = cluster.capacity_gb - plan(shape, model, changed, cluster).total
        tokens = int((trainer.microbatch_tokens + spare / per_token) // 1024 * 1024)
        if tokens >= trainer.microbatch_tokens:
            return words.removesuffix(" and ")
        if tokens >= least:
            return f"{words}trainer.microbatch_tokens={tokens} or less"
    return "more GPUs"


def rows(memory: Memory) -> Mapping[str, float]:
    """Part by part, in GB."""
    return {field.name: round(getattr(memory, field.name), 1) for field in fields(memory)} | {
        "total": round(memory.total, 1)
    }


def _mixer(config: Any) -> int:
    """Elements a token of an attention layer: normed input, queries (twice with a gate), keys, values, output."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries = config.num_attention_heads * head
    gated = 2 if "qwen3_5" in config.model_type or "qwen3_next" in config.model_type else 1
    return config.hidden_size + (1 + gated) * queries + 2 * config.num_key_value_heads * head


def _linear_mixer(config: Any) -> int:
    """And of a gated DeltaNet layer: normed input, projections before and after the convolution, gate, output."""
    if "linear_attention" not in (getattr(config, "layer_types", None) or ()):
        return 0
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    repeated = 2 * config.linear_num_value_heads * config.linear_key_head_dim
    return config.hidden_size + 2 * (2 * keys + values) + repeated + 2 * values


def _mlp(config: Any) -> int:
    """Of the MLP or the chosen experts: input, gate and up, their product, output, for each expert of a token."""
    experts = getattr(config, "num_experts", 0) or 0
    if not experts:
        return config.hidden_size + 3 * config.intermediate_size
    routed = config.num_experts_per_tok * (2 * config.hidden_size + 3 * config.moe_intermediate_size)
    shared = 3 * (getattr(config, "shared_expert_intermediate_size", 0) or 0)
    return routed + shared + 2 * experts
