"""The trainer of one process: plain AdamW over padded microbatches.

A Batch is cut into rows, sorted by length, and run a microbatch at a time; the loss of each is already divided by the
step's token count, so gradients add up to those of one large batch. The head is applied at loss tokens only. Parameters
in bfloat16 are stepped through float32 masters: at a learning rate of 1e-6 an update is far below bfloat16's spacing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rsi.loss import LossConfig, merge_metrics, policy_loss
from rsi.trainer import ModelConfig, TrainerConfig
from rsi.trainer.checkpoint import TrainerState, find, load_state, save
from rsi.trainer.qwen_moe import load_model
from rsi.types import Batch
from rsi_kernels.linear_logprob import linear_logprob


@dataclass(frozen=True)
class Microbatch:
    """R rows padded on the right to length S. What follows a row's last loss token is cut: nothing depends on it."""

    tokens: Tensor
    """int64 [R, S]; 0 in the padding, which a causal model never looks at from a loss token."""
    where: Tensor
    """int64 [M]: the loss tokens' predicting positions, as indices into [R * S]."""
    source: Tensor
    """int64 [M]: the same positions as indices into the Batch."""


class LocalTrainer:
    """Meets the Trainer Protocol; also holds the model's `tokenizer`."""

    def __init__(self, model: ModelConfig, trainer: TrainerConfig, loss: LossConfig):
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world > 1:
            raise ValueError(
                f"trainer.backend=local runs in one process, found WORLD_SIZE={world}; "
                "start torchrun with --nproc-per-node=1 on one node"
            )
        if trainer.threads:
            torch.set_num_threads(trainer.threads)
        self.version = 0
        self._model_config, self._config, self._loss = model, trainer, loss
        self.model, self.tokenizer = load_model(model)
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self._parameters]
        self._optimizer = torch.optim.AdamW(
            self._masters, lr=trainer.lr, betas=trainer.betas, weight_decay=trainer.weight_decay, fused=True
        )

    def update(self, batch: Batch) -> Mapping[str, float]:
        """One optimizer step. Raises FloatingPointError, weights as they were, if loss or gradient is not finite."""
        parts = []
        try:
            for microbatch in microbatches(batch, self._config.microbatch_tokens):
                parts.append(self._accumulate(batch, microbatch))
            grad_norm = self._grad_norm()
            learning_rate = self._step()
        finally:
            self._clear_grads()
        return {
            **merge_metrics(parts),
            "grad_norm": grad_norm,
            "lr": learning_rate,
            "num_tokens": float(len(batch.tokens)),
            "num_loss_tokens": float(batch.num_loss_tokens),
            "num_microbatches": float(len(parts)),
        }

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Any:
        """float32 numpy [N] of labels under the current weights, nats, 0 outside the mask."""
        result = torch.zeros(len(batch.tokens))
        for microbatch in microbatches(batch, self._config.microbatch_tokens):
            logp, _ = self._score(batch, microbatch)
            result[microbatch.source] = logp.cpu()
        return result.numpy()

    def save(self, directory: Path) -> None:
        masters = [m.detach() for m, p in zip(self._masters, self._parameters, strict=True) if m is not p]
        save(directory, self.model, self.tokenizer, TrainerState(self.version, self._optimizer.state_dict(), masters))

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Weights go into the module in place, so an engine that shares it keeps sharing it."""
        directory = find(directory)
        saved, _ = load_model(replace(self._model_config, path=str(directory)))
        state = load_state(directory)
        own = [m for m, p in zip(self._masters, self._parameters, strict=True) if m is not p]
        if len(own) != len(state.masters):
            raise ValueError(
                f"{directory} was saved under another model.dtype than {self._model_config.dtype}; resume with that one"
            )
        self.model.load_state_dict(saved.state_dict())
        self._optimizer.load_state_dict(state.optimizer)
        for master, stored in zip(own, state.masters, strict=True):
            master.copy_(stored)
        self.version = state.version

    def _accumulate(self, batch: Batch, microbatch: Microbatch) -> dict[str, float]:
        """Add one microbatch's gradient; returns its metrics."""
        logp, entropy = self._score(batch, microbatch)
        sampler = torch.from_numpy(batch.logprobs)[microbatch.source].to(logp.device)
        advantages = torch.from_numpy(batch.advantages)[microbatch.source].to(logp.device)
        mask = torch.ones_like(logp, dtype=torch.bool)
        loss, metrics = policy_loss(self._loss, logp, sampler, advantages, mask, batch.num_loss_tokens)
        if not math.isfinite(loss.item()):
            raise FloatingPointError(
                f"the loss of step {self.version} is {loss.item()}, weights are unchanged; largest ratio "
                f"{metrics['max_ratio']:.3g}, largest |advantage| {float(advantages.abs().max()):.3g}: look at the "
                "stored logprobs, or lower trainer.lr"
            )
        loss.backward()
        return {"loss": loss.item(), "entropy": float(entropy.detach().sum()) / batch.num_loss_tokens, **metrics}

    def _score(self, batch: Batch, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """(logp, entropy) of the microbatch's loss tokens, float32 [M]."""
        device = self._parameters[0].device
        hidden_RSH = self.model.model(input_ids=microbatch.tokens.to(device), use_cache=False).last_hidden_state
        hidden_MH = hidden_RSH.flatten(0, 1)[microbatch.where.to(device)]
        labels = torch.from_numpy(batch.labels)[microbatch.source].to(device)
        impl = "torch" if self._model_config.kernels == "off" else "auto"
        return linear_logprob(hidden_MH, self.model.get_output_embeddings().weight, labels, temperature=1.0, impl=impl)

    def _grad_norm(self) -> float:
        """Hand the gradients to the masters and clip them; returns the norm before clipping."""
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            if master is not parameter and parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.float(), None
        norm = float(torch.nn.utils.clip_grad_norm_(self._masters, self._config.max_grad_norm))
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm of step {self.version} is {norm}, weights are unchanged; lower trainer.lr, or go "
                "back to an earlier checkpoint"
            )
        return norm

    @torch.no_grad()
    def _step(self) -> float:
        learning_rate = self._learning_rate()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            if master is not parameter:
                parameter.copy_(master)
        self.version += 1
        return learning_rate

    def _learning_rate(self) -> float:
        config = self._config
        warm = min(1.0, (self.version + 1) / config.warmup_steps) if config.warmup_steps else 1.0
        left = max(0.05, 1 - self.version / config.decay_steps) if config.decay_steps else 1.0
        return config.lr * warm * left

    def _clear_grads(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)


def microbatches(batch: Batch, max_tokens: int) -> list[Microbatch]:
    """The rows that hold a loss token, longest first, as many together as fit in `max_tokens` with their padding.

    A row longer than that is run alone.
    """
    mask = torch.from_numpy(batch.mask)
    rows: list[Tensor] = []  # per row, the Batch positions of its tokens up to its last predicting position
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        predicting = mask[start:end].nonzero()[:, 0]
        if len(predicting):
            rows.append(torch.arange(start, start + int(predicting[-1]) + 1))
    rows.sort(key=len, reverse=True)
    cut: list[list[Tensor]] = []
    for row in rows:
        if cut and (len(cut[-1]) + 1) * len(cut[-1][0]) <= max_tokens:
            cut[-1].append(row)
        else:
            cut.append([row])
    return [_pad(batch, mask, group) for group in cut]


def _pad(batch: Batch, mask: Tensor, rows: list[Tensor]) -> Microbatch:
    length = len(rows[0])
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    where, source = [], []
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.from_numpy(batch.tokens)[row]
        predicting = mask[row].nonzero()[:, 0]
        where.append(i * length + predicting)
        source.append(row[predicting])
    return Microbatch(tokens, torch.cat(where), torch.cat(source))
