"""Trainers: one optimizer step from one batch. The Protocol, the config, and `build_trainer`.

A trainer sees a Batch and a loss; it knows no role, reward, domain or sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from rsi.loss import LossConfig
from rsi.types import Batch


@dataclass(frozen=True)
class ModelConfig:
    """The `model:` block of a recipe: any Qwen-class causal language model that transformers loads."""

    path: str = ""
    """A directory with config.json, safetensors and a tokenizer, or a hub name."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the parameters while training; router and head are computed in float32 either way."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """flash_attention_2 needs a GPU and `pip install 'rsi[gpu]'`."""
    kernels: Literal["auto", "off"] = "auto"
    """Head, routers and experts. auto: rsi_kernels (CUDA or Triton on Hopper and newer, torch elsewhere); off: the
    experts of transformers and plain torch."""
    thinking: bool = False
    """Leave the model's thinking on; off, templates that know it emit an empty think block."""


@dataclass(frozen=True)
class TrainerConfig:
    """The `trainer:` block of a recipe."""

    backend: Literal["local", "fsdp"] = "local"
    """local: one process, plain AdamW. fsdp: parameters, gradients and optimizer sharded over all ranks of torchrun."""
    layout: Literal["padded", "packed"] = "padded"
    """padded: a document a row. packed: documents end to end in one row, nothing wasted on padding."""
    lr: float = 1e-6
    """Constant after the warm-up (AutoEnvScaling, arXiv 2610.14163)."""
    warmup_steps: int = 0
    decay_steps: int = 0
    """Linear decay to a twentieth of lr over this many steps; 0: constant."""
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    offload: bool = False
    """fsdp: keep parameters, gradients and optimizer in host memory and step there; slower, and 16 bytes a parameter
    less on the GPUs."""
    microbatch_tokens: int = 8192
    """Tokens of one forward, padding included. Fastest: on a GPU all that memory holds, on a CPU near 2048 (its
    caches)."""
    checkpoint_activations: bool = False
    """Keep one activation a layer and recompute the rest in the backward: a third more compute, far less memory."""
    gate_mean: float = 0.05
    """Before the first update of a process: mean |ln p_trainer - ln p_engine| of its samples above which the run stops
    (a healthy bfloat16 MoE shows 0.02). 0: no bound."""
    gate_k3: float = 0.015
    """And the bound of the mean of w - 1 - ln w, which a few far tokens drive up. 0: no bound."""
    threads: int = 0
    """CPU threads of torch; 0: torch's own choice."""

    def lr_at(self, version: int) -> float:
        """The learning rate of the step that makes version + 1 of version."""
        warm = min(1.0, (version + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        left = max(0.05, 1 - version / self.decay_steps) if self.decay_steps else 1.0
        return self.lr * warm * left


class Trainer(Protocol):
    version: int
    """Optimizer steps taken; the policy version that rollouts carry."""
    model: Any
    """The module itself, which an in-process engine shares."""
    tokenizer: Any

    def update(self, batch: Batch) -> Mapping[str, float]:
        """One optimizer step. Returns scalar metrics (loss, grad_norm, masked fractions, mismatch, entropy, ...)."""
        ...

    def logprobs(self, batch: Batch) -> Any:
        """float32 [N] of labels under the current weights, nats, 0 outside the mask; no gradient."""
        ...

    def save(self, directory: Path) -> None:
        """Weights (safetensors, HF layout, with the tokenizer) and optimizer state, so that load goes on bit-equal."""
        ...

    def load(self, directory: Path) -> None: ...

    def export(self, directory: Path) -> None:
        """bfloat16 weights as `from_pretrained` and engines load them, with the tokenizer; no optimizer state."""
        ...

    def close(self) -> None:
        """Let go of other ranks; the trainer is not used again."""
        ...


@runtime_checkable
class Follower(Protocol):
    """A trainer of several processes, in all but the first."""

    def follow(self) -> None:
        """Do what the first process's trainer is told to, until it closes."""
        ...


def build_trainer(model: ModelConfig, trainer: TrainerConfig, loss: LossConfig) -> Trainer:
    match trainer.backend:
        case "local":
            from rsi.trainer.local import LocalTrainer

            return LocalTrainer(model, trainer, loss)
        case "fsdp":
            from rsi.trainer.fsdp import FsdpTrainer

            return FsdpTrainer(model, trainer, loss)
