"""One microbatch through the model and the loss, alike for every trainer.

The head is applied at loss tokens only and never keeps logits. The loss of a microbatch is already divided by the
step's counts, so gradients add up to those of one large batch, over microbatches and ranks.
"""

from __future__ import annotations

import contextlib
import functools
import math
import resource
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from rsi.loss import Counts, LossConfig, LossTokens, policy_loss
from rsi.trainer.documents import document_kwargs
from rsi.trainer.layout import Microbatch
from rsi.types import Batch
from rsi_kernels.impl import Impl
from rsi_kernels.linear_logprob import linear_logprob


class Scorer(nn.Module):
    """A causal language model whose forward gives log-probabilities of labels in place of logits.

    A module of its own, because the head's weight must be gathered while it is used when it is sharded.
    """

    def __init__(self, model: Any, kernels: Literal["auto", "off"] = "auto"):
        """kernels: see `ModelConfig`."""
        super().__init__()
        self.model = model
        self._impl: Impl = "torch" if kernels == "off" else "auto"

    def forward(
        self, tokens: Tensor, where: Tensor, labels: Tensor, bounds: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """tokens int64 [R, S]; where, labels int64 [M]; bounds as in Microbatch. Returns (logp, entropy), float32 [M],
        nats."""
        documents = document_kwargs(bounds, tokens.device) if bounds else {}
        hidden_RSH = self.model.model(input_ids=tokens, use_cache=False, **documents).last_hidden_state
        hidden_MH = hidden_RSH.flatten(0, 1)[where]
        weight = self.model.get_output_embeddings().weight
        return linear_logprob(hidden_MH, weight, labels, temperature=1.0, impl=self._impl)


def score(scorer: nn.Module, batch: Batch, microbatch: Microbatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """(logp, entropy) of the microbatch's loss tokens, float32 [M]."""
    labels = torch.from_numpy(batch.labels)[microbatch.source].to(device)
    return scorer(microbatch.tokens.to(device), microbatch.where.to(device), labels, microbatch.bounds)


def accumulate(
    scorer: nn.Module, config: LossConfig, batch: Batch, microbatch: Microbatch, device: torch.device
) -> dict[str, float]:
    """Add one microbatch's gradient; returns its part of the step's metrics."""
    logp, entropy = score(scorer, batch, microbatch, device)
    sampler, advantages = (
        torch.from_numpy(column)[microbatch.source].to(device) for column in (batch.logprobs, batch.advantages)
    )
    tokens = LossTokens(
        logp, logp.detach(), sampler, advantages, microbatch.sequence.to(device), microbatch.num_sequences
    )
    loss, metrics = policy_loss(config, tokens, Counts(batch.num_loss_tokens, batch.num_sequences))
    loss.backward()
    if len(logp):
        metrics["max_advantage"] = float(advantages.abs().max())
    return {"loss": loss.item(), "entropy": float(entropy.detach().sum()) / batch.num_loss_tokens, **metrics}


def check_loss(metrics: Mapping[str, float], version: int) -> None:
    """Raises FloatingPointError if the step's loss is not finite."""
    if not math.isfinite(metrics["loss"]):
        raise FloatingPointError(
            f"the loss of step {version} is {metrics['loss']}, weights are unchanged; largest ratio "
            f"{metrics['max_ratio']:.3g}, largest |advantage| {metrics['max_advantage']:.3g}: look at the "
            "stored logprobs, or lower trainer.lr"
        )


def check_grad_norm(norm: float, version: int) -> None:
    """Raises FloatingPointError if the gradient's norm is not finite."""
    if not math.isfinite(norm):
        raise FloatingPointError(
            f"the gradient norm of step {version} is {norm}, weights are unchanged; lower trainer.lr, or go "
            "back to an earlier checkpoint"
        )


def batch_metrics(batch: Batch, version: int) -> dict[str, float]:
    """What a step's batch looks like: lengths in tokens, staleness in policy versions."""
    lengths = np.diff(batch.cu_seqlens)
    stale = version - batch.versions
    return {
        "num_tokens": float(len(batch.tokens)),
        "num_loss_tokens": float(batch.num_loss_tokens),
        "num_sequences": float(batch.num_sequences),
        "length_mean": float(lengths.mean()),
        "length_max": float(lengths.max()),
        "staleness_mean": float(stale.mean()),
        "staleness_max": float(stale.max()),
    }


class ExpertLoad:
    """How evenly the routers of a model share out the tokens of the microbatches that it is told of."""

    def __init__(self, model: nn.Module):
        self._open = False
        routers: list[Any] = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
        self._shape = (len(routers), routers[0].num_experts if routers else 0)
        self._counts = torch.zeros(self._shape, dtype=torch.int64)
        for depth, router in enumerate(routers):
            router.register_forward_hook(functools.partial(self._see, depth))

    def reset(self, device: torch.device) -> None:
        self._counts = torch.zeros(self._shape, dtype=torch.int64, device=device)

    @contextlib.contextmanager
    def watching(self, microbatch: Microbatch) -> Iterator[None]:
        """Count the forwards within; not those of an idle microbatch, nor of an engine that shares the module."""
        self._open = microbatch.num_sequences > 0
        try:
            yield
        finally:
            self._open = False

    def _see(self, depth: int, router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        """output: (logits, gates, expert ids [T, K])."""
        if self._open:
            self._counts[depth] += torch.bincount(output[2].detach().flatten(), minlength=router.num_experts)

    @property
    def counts(self) -> Tensor:
        """int64 [layers, experts]: tokens that each expert got since `reset`, padding included; empty in a dense
        model."""
        return self._counts


def expert_metrics(counts: Tensor) -> dict[str, float]:
    """expert_load_max: the busiest expert of any layer over its layer's mean; 1 is even. expert_unused_frac: experts
    that got no token."""
    if not counts.numel():
        return {}
    load = counts.float()
    busiest = load.max(-1).values / load.mean(-1).clamp(min=1e-9)
    return {"expert_load_max": float(busiest.max()), "expert_unused_frac": float((counts == 0).float().mean())}


def memory_peak_mb(device: torch.device) -> float:
    """Of the device since the process began; of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
