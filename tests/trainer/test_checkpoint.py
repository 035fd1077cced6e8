"""Checkpoints: bit-equal resumption, and nothing half-written."""

from __future__ import annotations

import random
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from rsi.loss import LossConfig
from rsi.pack import pack
from rsi.trainer import ModelConfig, TrainerConfig
from rsi.trainer.checkpoint import export_bf16, find
from rsi.trainer.local import LocalTrainer
from rsi.trainer.qwen_moe import load_model
from rsi.types import Batch, Sample


def make_trainer(path: Path, dtype: str = "float32") -> LocalTrainer:
    config = TrainerConfig(lr=1e-3, warmup_steps=3, threads=1)
    return LocalTrainer(ModelConfig(str(path), dtype), config, LossConfig())  # pyright: ignore[reportArgumentType]


def make_batch(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    samples = [
        Sample(tuple(rng.integers(0, 270, 12).tolist()), (False,) * 6 + (True,) * 6, (-5.0,) * 12, a, "solver", 0)
        for a in (0.5, -0.5)
    ]
    return pack(samples)


def weights(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    return trainer.model.state_dict()


@contextmanager
def files_no_larger_than(num_bytes: int) -> Iterator[None]:
    """What a full disk does to a writer, without filling one: write(2) fails with an OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_four_steps_equal_two_and_two_after_a_resume(model_dir: Path, tmp_path: Path, dtype: str):
    straight = make_trainer(model_dir, dtype)
    for step in range(4):
        straight.update(make_batch(step))
    first = make_trainer(model_dir, dtype)
    first.update(make_batch(0))
    first.update(make_batch(1))
    first.save(tmp_path / "step-2")
    resumed = make_trainer(model_dir, dtype)
    module = resumed.model
    resumed.load(tmp_path / "step-2")
    assert resumed.version == 2 and resumed.model is module
    resumed.update(make_batch(2))
    resumed.update(make_batch(3))
    assert resumed.version == 4
    for name, tensor in weights(straight).items():
        assert torch.equal(tensor, weights(resumed)[name]), name


def test_random_state_goes_on(model_dir: Path, tmp_path: Path):
    trainer = make_trainer(model_dir)
    trainer.save(tmp_path / "c")

    def drawn() -> tuple[list[float], float, float]:
        return torch.rand(3).tolist(), random.random(), float(np.random.rand())

    expected = drawn()
    torch.manual_seed(123)
    trainer.load(tmp_path / "c")
    assert drawn() == expected


def test_a_checkpoint_is_a_model_directory(model_dir: Path, tmp_path: Path):
    trainer = make_trainer(model_dir)
    trainer.update(make_batch(0))
    trainer.save(tmp_path / "c")
    module, tokenizer = load_model(ModelConfig(str(tmp_path / "c")))
    assert torch.equal(module.state_dict()["model.norm.weight"], weights(trainer)["model.norm.weight"])
    assert tokenizer.decode(tokenizer.encode("ls -l")) == "ls -l"


def test_saving_again_replaces_and_leaves_nothing_else(model_dir: Path, tmp_path: Path):
    trainer = make_trainer(model_dir)
    trainer.save(tmp_path / "latest")
    trainer.update(make_batch(0))
    trainer.save(tmp_path / "latest")
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
    fresh = make_trainer(model_dir)
    fresh.load(tmp_path / "latest")
    assert fresh.version == 1


@pytest.mark.parametrize("limit", [100_000, 300_000])
def test_a_full_disk_leaves_the_previous_checkpoint(model_dir: Path, tmp_path: Path, limit: int):
    """100,000 bytes stop the weights, 300,000 the optimizer's state."""
    trainer = make_trainer(model_dir)
    trainer.update(make_batch(0))
    trainer.save(tmp_path / "latest")
    sizes = [(tmp_path / "latest" / name).stat().st_size for name in ("model.safetensors", "trainer.pt")]
    assert 100_000 < sizes[0] < 300_000 < sizes[1]
    trainer.update(make_batch(1))
    with files_no_larger_than(limit), pytest.raises(OSError, match="latest.*previous one is untouched"):
        trainer.save(tmp_path / "latest")
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
    fresh = make_trainer(model_dir)
    fresh.load(tmp_path / "latest")
    assert fresh.version == 1


def test_a_kill_while_replacing_loses_nothing(model_dir: Path, tmp_path: Path):
    """Between the two renames the old checkpoint stands aside; load finds it there."""
    trainer = make_trainer(model_dir)
    trainer.update(make_batch(0))
    trainer.save(tmp_path / "latest")
    (tmp_path / "latest").rename(tmp_path / ".latest.previous")
    fresh = make_trainer(model_dir)
    fresh.load(tmp_path / "latest")
    assert fresh.version == 1
    fresh.save(tmp_path / "latest")
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


def test_an_unfinished_checkpoint_is_refused(model_dir: Path, tmp_path: Path):
    trainer = make_trainer(model_dir)
    trainer.save(tmp_path / "c")
    (tmp_path / "c/COMPLETE").unlink()
    with pytest.raises(ValueError, match="not written whole"):
        trainer.load(tmp_path / "c")
    with pytest.raises(ValueError, match="no checkpoint"):
        find(tmp_path / "nowhere")


def test_another_dtype_is_refused_before_anything_changes(model_dir: Path, tmp_path: Path):
    make_trainer(model_dir, "bfloat16").save(tmp_path / "c")
    trainer = make_trainer(model_dir)
    before = {name: tensor.clone() for name, tensor in weights(trainer).items()}
    with pytest.raises(ValueError, match="model.dtype"):
        trainer.load(tmp_path / "c")
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(trainer).items())


def test_export_is_bfloat16_and_loads(model_dir: Path, tmp_path: Path):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    trainer = make_trainer(model_dir)
    export_bf16(trainer.model, trainer.tokenizer, tmp_path / "tiny")
    stored = load_file(tmp_path / "tiny/model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "tiny").dtype == torch.bfloat16
    assert not (tmp_path / "tiny/trainer.pt").exists()
    assert trainer.model.dtype == torch.float32
    again, _ = load_model(ModelConfig(str(tmp_path / "tiny")))
    norm = weights(trainer)["model.layers.0.mlp.experts.down_proj"]
    assert torch.equal(again.state_dict()["model.layers.0.mlp.experts.down_proj"], norm.bfloat16().float())


def test_an_export_may_be_shipped_without_its_source(model_dir: Path, tmp_path: Path):
    copy = tmp_path / "source"
    shutil.copytree(model_dir, copy)
    module, tokenizer = load_model(ModelConfig(str(copy)))
    shutil.rmtree(copy)
    export_bf16(module, tokenizer, tmp_path / "out")
    assert len(load_model(ModelConfig(str(tmp_path / "out")))[1]) == len(tokenizer)
