"""`rsi plan`: predicted memory against published runs, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rsi.cli import main
from rsi.trainer import ModelConfig, TrainerConfig
from rsi.trainer.plan import GPUS, Cluster, Shape, mend, plan, read_cluster, shape_of
from tests.trainer.models import tiny_model

MODEL = ModelConfig("Qwen/Qwen3-30B-A3B", "bfloat16")
TRAINER = TrainerConfig(backend="fsdp", checkpoint_activations=True, microbatch_tokens=32768)
H200 = Cluster(1, 8, "H200")


@pytest.fixture(scope="module")
def shape() -> Shape:
    return shape_of("Qwen/Qwen3-30B-A3B")


def test_parameters_are_those_of_the_published_models(shape: Shape):
    assert shape.parameters == pytest.approx(30.53e9, rel=1e-3)
    assert shape_of("Qwen/Qwen3.6-35B-A3B").parameters == pytest.approx(34.66e9, rel=1e-3)


@pytest.mark.parametrize(("tokens", "gib"), [(16384, 74.6), (65536, 105.4)])
def test_two_published_runs_on_eight_h200_are_met_within_five_percent(shape: Shape, tokens: int, gib: float):
    memory = plan(shape, MODEL, replace(TRAINER, microbatch_tokens=tokens), H200)
    # Their head works on smaller chunks than ours; taken as 1,024 rows of three float32 buffers.
    predicted = memory.total - memory.logits + 3 * 4 * 1024 * shape.vocab / 1e9
    assert predicted * 1e9 / 2**30 == pytest.approx(gib, rel=0.05)


def test_state_is_sixteen_bytes_a_parameter_over_all_ranks(shape: Shape):
    for nodes in (1, 2):
        memory = plan(shape, MODEL, TRAINER, Cluster(nodes, 8, "H100"))
        state = memory.weights + memory.optimizer + memory.gradients
        assert state == pytest.approx(16 * shape.parameters / (8 * nodes) / 1e9)
    offloaded = plan(shape, MODEL, replace(TRAINER, offload=True), H200)
    assert offloaded.weights + offloaded.optimizer + offloaded.gradients == 0
    assert offloaded.host == pytest.approx(16 * shape.parameters / 1e9)


def test_what_cannot_fit_gets_a_mend_that_fits(shape: Shape):
    h100 = Cluster(1, 8, "H100")
    assert plan(shape, MODEL, TRAINER, h100).total > GPUS["H100"]
    advice = mend(shape, MODEL, TRAINER, h100)
    assert advice.startswith("trainer.microbatch_tokens=") and advice.endswith(" or less")
    tokens = int(advice.removeprefix("trainer.microbatch_tokens=").removesuffix(" or less"))
    assert plan(shape, MODEL, replace(TRAINER, microbatch_tokens=tokens), h100).total <= GPUS["H100"]
    assert plan(shape, MODEL, replace(TRAINER, microbatch_tokens=tokens + 1024), h100).total > GPUS["H100"]
    kept = replace(TRAINER, checkpoint_activations=False)
    assert mend(shape, MODEL, kept, H200) == "trainer.checkpoint_activations=true"
    assert mend(shape, MODEL, replace(TRAINER, microbatch_tokens=8192), Cluster(1, 4, "H100")).startswith(
        "trainer.offload=true"
    )


@pytest.mark.parametrize("text", ["8", "8xT4", "0xH100", "8xh100", "x8xH100"])
def test_a_cluster_that_is_none_is_refused(text: str):
    with pytest.raises(ValueError, match="write 8xH200 or 2x8xH100"):
        read_cluster(text)


def test_the_command_prints_a_table_of_any_model_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    assert main(["plan", f"model.path={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("8xH200", "8xH100", "2x8xH100", "optimizer", "left for an engine"))


def test_the_command_refuses_what_cannot_fit_with_exit_code_2(capsys: pytest.CaptureFixture[str]):
    keys = ["model.path=Qwen/Qwen3-30B-A3B", "model.dtype=bfloat16", "trainer.microbatch_tokens=65536"]
    assert main(["plan", "--json", "--cluster", "8xH100", "--cluster", "8xH200", *keys]) == 2
    out, err = capsys.readouterr()
    assert not json.loads(out)["clusters"]["8xH100"]["fits"]
    assert "rsi: 8xH100 cannot hold it:" in err and "use trainer." in err
    recomputed = [*keys, "trainer.checkpoint_activations=true"]
    assert main(["plan", "--json", "--cluster", "8xH200", *recomputed]) == 0
