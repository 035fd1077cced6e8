"""The trainer of one process: plain AdamW over microbatches.

Parameters in bfloat16 are stepped through float32 masters: at a learning rate of 1e-6 an update is far below bfloat16's
spacing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rsi.loss import LossConfig
from rsi.loss_metrics import derive, merge_metrics
from rsi.trainer import ModelConfig, TrainerConfig
from rsi.trainer.checkpoint import TrainerState, export_bf16, find, load_state, save
from rsi.trainer.documents import check_apart, keep_documents_apart
from rsi.trainer.layout import Microbatch, packed, padded
from rsi.trainer.qwen_moe import checkpoint_activations, load_model
from rsi.trainer.scoring import (
    ExpertLoad,
    Scorer,
    accumulate,
    batch_metrics,
    check_grad_norm,
    check_loss,
    expert_metrics,
    memory_peak_mb,
    score,
)
from rsi.types import Batch


class LocalTrainer:
    """Meets the Trainer Protocol; also holds the model's `tokenizer`."""

    def __init__(self, model: ModelConfig, trainer: TrainerConfig, loss: LossConfig):
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world > 1:
            raise ValueError(
                f"trainer.backend=local runs in one process, found WORLD_SIZE={world}; "
                "start torchrun with --nproc-per-node=1 on one node, or set trainer.backend=fsdp"
            )
        if trainer.threads:
            torch.set_num_threads(trainer.threads)
        self.version = 0
        self._model_config, self._config, self._loss = model, trainer, loss
        self.model, self.tokenizer = load_model(model)
        self._scorer, self._experts = Scorer(self.model, model.kernels), ExpertLoad(self.model)
        self._device = next(self.model.parameters()).device
        if trainer.layout == "packed":
            check_apart(self.model, self._device, self.model.dtype)
            keep_documents_apart(self.model)
        if trainer.checkpoint_activations:
            checkpoint_activations(self.model)
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self._parameters]
        self._optimizer = torch.optim.AdamW(
            self._masters, lr=trainer.lr, betas=trainer.betas, weight_decay=trainer.weight_decay, fused=True
        )

    def update(self, batch: Batch) -> Mapping[str, float]:
        """One optimizer step. Raises FloatingPointError, weights as they were, if loss or gradient is not finite."""
        cut = self._cut(batch)
        self._scorer.train(self._config.checkpoint_activations)
        try:
            self._experts.reset(self._device)
            parts = []
            for part in cut:
                with self._experts.watching(part):
                    parts.append(accumulate(self._scorer, self._loss, batch, part, self._device))
            metrics = derive(merge_metrics(parts))
            check_loss(metrics, self.version)
            grad_norm = self._grad_norm()
            learning_rate = self._step()
        finally:
            self._scorer.eval()
            self._clear_grads()
        return {
            **metrics,
            **expert_metrics(self._experts.counts),
            **batch_metrics(batch, self.version - 1),
            "grad_norm": grad_norm,
            "lr": learning_rate,
            "num_microbatches": float(len(parts)),
            "memory_peak_mb": memory_peak_mb(self._device),
        }

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Any:
        """float32 numpy [N] of labels under the current weights, nats, 0 outside the mask."""
        result = torch.zeros(len(batch.tokens))
        for microbatch in self._cut(batch):
            logp, _ = score(self._scorer, batch, microbatch, self._device)
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

    def export(self, directory: Path) -> None:
        export_bf16(self.model, self.tokenizer, directory)

    def close(self) -> None:
        """There is no other rank."""

    def _cut(self, batch: Batch) -> list[Microbatch]:
        return (packed if self._config.layout == "packed" else padded)(batch, self._config.microbatch_tokens)

    def _grad_norm(self) -> float:
        """Hand the gradients to the masters and clip them; returns the norm before clipping."""
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            if master is not parameter and parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.float(), None
        norm = float(torch.nn.utils.clip_grad_norm_(self._masters, self._config.max_grad_norm))
        check_grad_norm(norm, self.version)
        return norm

    @torch.no_grad()
    def _step(self) -> float:
        learning_rate = self._config.lr_at(self.version)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            if master is not parameter:
                parameter.copy_(master)
        self.version += 1
        return learning_rate

    def _clear_grads(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)
