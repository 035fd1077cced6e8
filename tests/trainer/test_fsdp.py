"""The sharded trainer on gloo: two ranks equal one, and equal the local trainer.

Two launches (one rank with its state on the host, then two that recompute activations) do everything once; the tests
read what they told.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rsi.loss import LossConfig
from rsi.trainer import ModelConfig, TrainerConfig
from rsi.trainer.local import LocalTrainer
from rsi.trainer.qwen_moe import load_model, meta_model
from rsi.trainer.weight_files import WeightFiles
from tests.trainer.fsdp_driver import STEPS, batches
from tests.trainer.models import KINDS, Kind, save_tokenizer, tiny_model
from tests.trainer.ranks import drive

DRIVER = Path(__file__).with_name("fsdp_driver.py")


@pytest.fixture(scope="module")
def told(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    work = tmp_path_factory.mktemp("fsdp")
    runs = {
        world: drive(world, DRIVER, work / f"{world}.json", str(model_dir), str(work / "shared")) for world in (1, 2)
    }
    return runs | {0: work / "shared"}


def test_two_ranks_take_the_steps_of_one(told: dict[int, Any]):
    for one, two in zip([*told[1]["steps"], told[1]["next"]], [*told[2]["steps"], told[2]["next"]], strict=True):
        assert one["loss"] == pytest.approx(two["loss"], abs=1e-6)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-5)
        for name in one.keys() - {"memory_peak_mb"}:  # sums over microbatches, in another order
            assert one[name] == pytest.approx(two[name], rel=1e-3, abs=1e-5), name


def test_two_ranks_end_with_the_weights_of_one(told: dict[int, Any]):
    # Adam divides by the gradient's size: rounding of a gradient near zero shows up to lr = 1e-3 in single elements
    for name, (total, squares) in told[1]["weights"].items():
        assert squares == pytest.approx(told[2]["weights"][name][1], rel=1e-3), name
        assert total == pytest.approx(told[2]["weights"][name][0], abs=2e-2), name


def test_the_sharded_trainer_equals_the_local_one(told: dict[int, Any], model_dir: Path):
    config = TrainerConfig(layout="packed", lr=1e-3, microbatch_tokens=80, threads=1)
    local = LocalTrainer(ModelConfig(str(model_dir)), config, LossConfig())
    np.testing.assert_allclose(told[2]["logprobs"], local.logprobs(batches(0)), atol=1e-5)
    for step in range(STEPS):
        assert told[2]["steps"][step]["loss"] == pytest.approx(local.update(batches(step))["loss"], abs=1e-5)


def test_no_rank_reads_or_holds_the_whole_model(told: dict[int, Any]):
    whole = told[1]["read"]
    assert told[1]["held"] == whole
    # odd numbers of rows leave one more with the first rank
    assert told[2]["read"] <= 0.52 * whole and told[2]["held"] <= 0.52 * whole


@pytest.mark.parametrize(("world", "saved"), [(1, 1), (2, 1), (2, 2)])
def test_a_resume_goes_on_as_if_nothing_had_happened_on_any_number_of_ranks(
    told: dict[int, Any], world: int, saved: int
):
    resumed = told[world][f"resumed after-{saved}"]
    assert resumed["version"] == STEPS
    # bit for bit on as many ranks; on others the three steps before summed in another order
    assert resumed["weights"] is (world == saved) and resumed["next_weights"] is (world == saved)
    assert resumed["next"]["loss"] == pytest.approx(told[world]["next"]["loss"], abs=1e-6)


@pytest.mark.parametrize("world", [1, 2])
def test_an_update_that_is_not_finite_changes_nothing_on_any_rank(told: dict[int, Any], world: int):
    assert "the loss of step 3 is nan, weights are unchanged" in told[world]["refused"]
    assert told[world]["version"] == STEPS and told[world]["after_refusal"]


@pytest.mark.parametrize("world", [1, 2])
def test_a_rank_that_cannot_write_stops_the_save_and_not_the_run(told: dict[int, Any], world: int):
    assert "could not write the checkpoint" in told[world]["unwritable"] and "rank 0" in told[world]["unwritable"]
    assert told[world]["alive"] == STEPS + 1


def test_an_export_loads_with_transformers(told: dict[int, Any]):
    from transformers import AutoModelForCausalLM

    directory = told[0] / "export-2"
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"] and config["dtype"] == "bfloat16"
    module = AutoModelForCausalLM.from_pretrained(directory)
    assert module.dtype == torch.bfloat16
    # the driver exports after a resume and one more step
    for name, tensor in module.state_dict().items():
        squares = float(tensor.double().square().sum())
        assert squares == pytest.approx(told[2]["next_weights"][name][1], rel=1e-2), name
    assert load_model(ModelConfig(str(directory)))[1].decode([0, 1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spelling", ["as saved", "multimodal", "fused"])
def test_rows_of_a_checkpoint_are_those_that_transformers_loads(kind: Kind, spelling: str, tmp_path: Path):
    from safetensors.torch import load_file, save_file

    module = tiny_model(kind)
    module.save_pretrained(tmp_path, max_shard_size="60KB")
    save_tokenizer(tmp_path)
    if spelling != "as saved":
        stored = dict(module.state_dict()) if spelling == "fused" else {}
        for path in tmp_path.glob("*.safetensors"):
            if spelling == "multimodal":
                stored |= {k.replace("model.", "model.language_model.", 1): v for k, v in load_file(path).items()}
            path.unlink()
        (tmp_path / "model.safetensors.index.json").unlink()
        save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    files, expected = WeightFiles(tmp_path), module.state_dict()
    names = [name for name, _ in meta_model(ModelConfig(str(tmp_path))).named_parameters()]
    assert set(names) == set(expected)
    for name in names:
        rows = len(expected[name])
        for start, end in ((0, rows // 2), (rows // 2, rows)):
            part = torch.full((end - start, *expected[name].shape[1:]), torch.nan)
            files.fill(name, part, start)
            assert torch.equal(part, expected[name][start:end]), name


def test_a_checkpoint_that_lacks_a_tensor_or_has_another_shape_is_refused(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.layers.1.mlp.experts.3.up_proj.weight"], stored["model.norm.weight"]
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    files = WeightFiles(tmp_path)
    with pytest.raises(ValueError, match="lack model.layers.1.mlp.experts.gate_up_proj, expert 3"):
        files.fill("model.layers.1.mlp.experts.gate_up_proj", torch.zeros(8, 48, 32), 0)
    with pytest.raises(ValueError, match="lack model.norm.weight"):
        files.fill("model.norm.weight", torch.zeros(32), 0)
    with pytest.raises(ValueError, match="do not belong together"):
        files.fill("lm_head.weight", torch.zeros(270, 16), 0)
    with pytest.raises(ValueError, match="neither model.safetensors nor"):
        WeightFiles(tmp_path / "nowhere")
