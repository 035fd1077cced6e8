"""The sharded trainer: FSDP2's `fully_shard`, started by plain torchrun, any number of ranks.

Parameters are kept in float32, a slice on each rank, and gathered layer by layer in model.dtype; gradients are summed
in float32. The first rank runs the loop and leads: each of its calls is told to the others, which `follow`. Every rank
holds the whole Batch and trains on its share of the microbatches.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rsi.loss import LossConfig
from rsi.loss_metrics import derive, merge_metrics
from rsi.trainer import ModelConfig, TrainerConfig
from rsi.trainer.checkpoint import write_whole
from rsi.trainer.documents import check_apart, keep_documents_apart
from rsi.trainer.layout import Microbatch, packed, padded, share
from rsi.trainer.qwen_moe import checkpoint_activations, load_model, load_tokenizer, meta_model
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
from rsi.trainer.sharded_checkpoint import load_shards, save_shards
from rsi.trainer.weight_files import WeightFiles
from rsi.types import Batch

COLLECTIVE_TIMEOUT = timedelta(minutes=60)
WAIT_TIMEOUT = timedelta(days=7)
"""How long a follower waits for the next call: rollouts lie between two of them."""

AGREED = (FloatingPointError, OSError, ValueError)
"""What a call raises on every rank alike: an update that is not finite, a checkpoint that cannot be written or read."""


class FsdpTrainer:
    """Meets the Trainer Protocol on the first rank; the others call `follow` once and nothing else."""

    def __init__(self, model: ModelConfig, trainer: TrainerConfig, loss: LossConfig):
        if trainer.threads:
            torch.set_num_threads(trainer.threads)
        self._device = join_ranks()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._calls: Any = dist.new_group(backend="gloo", timeout=WAIT_TIMEOUT)
        self.version = 0
        self._model_config, self._config, self._loss = model, trainer, loss
        self._module = meta_model(model)
        self.tokenizer = load_tokenizer(model, self._module)
        self._scorer, self._experts = Scorer(self._module, model.kernels), ExpertLoad(self._module)
        if trainer.layout == "packed":
            check_apart(self._module, self._device, getattr(torch, model.dtype))
            keep_documents_apart(self._module)
        if trainer.checkpoint_activations:
            checkpoint_activations(self._module)
        shard(self._scorer, self._device, getattr(torch, model.dtype), trainer.offload)
        self.num_bytes_read = fill_shards(self._scorer, local_directory(model.path), self._device, trainer.offload)
        self._parameters = [p for p in self._module.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=trainer.lr, betas=trainer.betas, weight_decay=trainer.weight_decay, foreach=False
        )
        self._replica: Any = None
        self._has_replica = self._is_broken = False

    # --- the Protocol, on the first rank ----------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """A whole copy on the first rank, for an engine that shares it; made at the first call and kept up to date."""
        if self._replica is None:
            self._lead("replicate")
        return self._replica

    def update(self, batch: Batch) -> Mapping[str, float]:
        """One optimizer step. Raises FloatingPointError, weights as they were, if loss or gradient is not finite."""
        return self._lead("update", batch)

    def logprobs(self, batch: Batch) -> Any:
        """float32 numpy [N] of labels under the current weights, nats, 0 outside the mask."""
        return self._lead("logprobs", batch)

    def save(self, directory: Path) -> None:
        """Shards of weights, optimizer and random state. Raises OSError, nothing left there, if any rank cannot."""
        self._lead("save", directory)

    def load(self, directory: Path) -> None:
        """Goes on from what any number of ranks saved. Raises ValueError for a checkpoint that is not whole."""
        self._lead("load", directory)

    def export(self, directory: Path) -> None:
        """bfloat16 weights as transformers writes them, with the tokenizer; gathered on the first rank."""
        self._lead("export", directory)

    def close(self) -> None:
        """The others stop following, and all ranks leave.

        After a call that broke on this rank alone nobody is told: the others are in the middle of that call, and
        torchrun ends them once this process is gone.
        """
        if not self._is_broken:
            self._tell(None)
            dist.destroy_process_group()

    # --- the others -------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Do what the first rank does until it closes. Signals to stop are the first rank's to answer."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        while (call := self._tell(None)) is not None:
            name, arguments = call
            try:
                getattr(self, f"_{name}")(*arguments)
            except AGREED:
                pass  # every rank raised it, and the first one tells
        dist.destroy_process_group()

    def _lead(self, name: str, *arguments: Any) -> Any:
        assert self.rank == 0, "only the first rank calls a trainer; the others follow"
        self._tell((name, arguments))
        self._is_broken = True
        try:
            result = getattr(self, f"_{name}")(*arguments)
        except AGREED:
            self._is_broken = False
            raise
        self._is_broken = False
        return result

    def _tell(self, call: Any) -> Any:
        box = [call]
        dist.broadcast_object_list(box, src=0, group=self._calls)
        return box[0]

    # --- on every rank ----------------------------------------------------------------------------------------------

    def _update(self, batch: Batch) -> Mapping[str, float]:
        cut = self._cut(batch)
        mine = share(cut, self.rank, self.world)
        self._scorer.train(self._config.checkpoint_activations)
        try:
            self._experts.reset(self._device)
            parts = []
            for part in mine:
                with self._experts.watching(part):
                    parts.append(accumulate(self._scorer, self._loss, batch, part, self._device))
            everyones = [part for parts_of_rank in self._gather(parts) for part in parts_of_rank]
            metrics = derive(merge_metrics(everyones))
            check_loss(metrics, self.version)
            grad_norm = self._grad_norm()
            check_grad_norm(grad_norm, self.version)
            learning_rate = self._step()
        finally:
            self._scorer.eval()
            self._optimizer.zero_grad(set_to_none=True)
        if self._has_replica:
            self._copy_to_replica()
        return {
            **metrics,
            **expert_metrics(self._expert_counts()),
            **batch_metrics(batch, self.version - 1),
            "grad_norm": grad_norm,
            "lr": learning_rate,
            "num_microbatches": float(len(cut)),
            "memory_peak_mb": max(self._gather(memory_peak_mb(self._device))),
        }

    @torch.no_grad()
    def _logprobs(self, batch: Batch) -> Any:
        result = torch.zeros(len(batch.tokens))
        for part in share(self._cut(batch), self.rank, self.world):
            logp, _ = score(self._scorer, batch, part, self._device)
            result[part.source] = logp.cpu()
        dist.all_reduce(result, group=self._calls)
        return result.numpy()

    def _save(self, directory: Path) -> None:
        def write_rest(path: Path) -> None:
            self._module.config.save_pretrained(path)
            self.tokenizer.save_pretrained(path)

        save_shards(directory, self._scorer, self._optimizer, self.version, self._calls, write_rest)

    def _load(self, directory: Path) -> None:
        self.version = load_shards(directory, self._scorer, self._optimizer, self._calls)
        if self._has_replica:
            self._copy_to_replica()

    @torch.no_grad()
    def _export(self, directory: Path) -> None:
        whole: dict[str, Tensor] = {}
        for name, parameter in self._module.named_parameters():
            tensor = full(parameter.detach().to(torch.bfloat16))
            if self.rank == 0:
                whole[name] = tensor.cpu()
        if self.rank == 0:
            module = meta_model(self._model_config).to(torch.bfloat16)

            def write(path: Path) -> None:
                module.save_pretrained(path, state_dict=whole)
                self.tokenizer.save_pretrained(path)

            write_whole(directory, write)

    def _replicate(self) -> None:
        self._has_replica = True
        if self.rank == 0:
            self._replica, _ = load_model(self._model_config)
        self._copy_to_replica()

    @torch.no_grad()
    def _copy_to_replica(self) -> None:
        targets = dict(self._replica.named_parameters()) if self.rank == 0 else {}
        for name, parameter in self._module.named_parameters():
            tensor = full(parameter.detach().to(getattr(torch, self._model_config.dtype)))
            if self.rank == 0:
                targets[name].copy_(tensor)

    def _cut(self, batch: Batch) -> list[Microbatch]:
        return (packed if self._config.layout == "packed" else padded)(batch, self._config.microbatch_tokens)

    def _grad_norm(self) -> float:
        """Clip the gradients; returns the norm over all ranks before that, the same on each."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm, foreach=False)
        return float(full(norm))

    def _step(self) -> float:
        learning_rate = self._config.lr_at(self.version)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self.version += 1
        return learning_rate

    def _expert_counts(self) -> Tensor:
        counts = self._experts.counts
        if counts.numel():
            dist.all_reduce(counts)
        return counts

    def _gather(self, value: Any) -> list[Any]:
        """Every rank's value, in order of rank."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self._calls)
        return values


def join_ranks() -> torch.device:
    """Join the ranks that torchrun started, or be the only one; returns this rank's device."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    return device


def shard(scorer: Scorer, device: torch.device, dtype: torch.dtype, offload: bool) -> None:
    """Slice every parameter over all ranks, a layer at a time, what is left with the head. Gradients are summed, not
    averaged: the loss of each rank is already divided by the whole step's count."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # cast_forward_inputs=False: cosines and sines of the positions stay as the model computed them
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    offloading = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    for layer in scorer.model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offloading)
    fully_shard(scorer, mesh=mesh, mp_policy=policy, offload_policy=offloading)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # torch <= 2.13 zeroes bfloat16 sums otherwise (#190747)
    assert all(isinstance(p, DTensor) for p in scorer.parameters()), "fully_shard left a parameter whole"


@torch.no_grad()
def fill_shards(scorer: Scorer, directory: Path, device: torch.device, offload: bool) -> int:
    """Give the sharded parameters memory and read this rank's rows of each; returns how many bytes were read."""
    buffers = {name: buffer.clone() for name, buffer in scorer.named_buffers()}
    scorer.to_empty(device="cpu" if offload else device)
    for name, buffer in scorer.named_buffers():
        buffer.copy_(buffers[name])
    if offload:
        for buffer_owner in scorer.modules():
            for name, buffer in buffer_owner.named_buffers(recurse=False):
                setattr(buffer_owner, name, buffer.to(device))
    files, rank, world = WeightFiles(directory), dist.get_rank(), dist.get_world_size()
    for name, parameter in scorer.model.named_parameters():
        rows = parameter.to_local()
        start = min(rank * -(-parameter.shape[0] // world), parameter.shape[0])  # Shard(0) cuts as torch.chunk does
        files.fill(name, rows, start)
    return files.num_bytes_read


def local_directory(path: str) -> Path:
    """Where the weights of a directory or a hub name lie; fetched by one rank of a node, found by the others."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    for turn in (True, False):
        if (int(os.environ.get("LOCAL_RANK", "0")) == 0) is turn:
            found = Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))
        dist.barrier()
    return found  # pyright: ignore[reportPossiblyUnboundVariable]


def full(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded; a collective call if it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
