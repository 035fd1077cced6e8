"""The recipe that makes the shipped model, and the model that it made."""

import subprocess
import sys
from pathlib import Path

import numpy as np

from recipes import cold_start
from rsi.chat import Chat
from rsi.domains.terminal_traces import draw_trace
from rsi.trainer import ModelConfig
from rsi.trainer.qwen_moe import load_model


def test_the_shipped_model_is_a_small_qwen3_moe_in_bfloat16(repo: Path):
    from safetensors import safe_open

    shipped = repo / "recipes" / "tiny_model"
    module, tokenizer = load_model(ModelConfig(str(shipped)))
    assert type(module).__name__ == "Qwen3MoeForCausalLM"
    assert module.config.num_experts >= 8 and len(tokenizer) <= 4096
    assert 1e6 <= sum(p.numel() for p in module.parameters()) <= 10e6
    [weights] = shipped.glob("*.safetensors")
    assert weights.stat().st_size < 16 << 20
    with safe_open(str(weights), "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


def test_a_trace_weighs_what_is_said_and_not_what_is_a_mistake(repo: Path):
    _, tokenizer = load_model(ModelConfig(str(repo / "recipes" / "tiny_model")))
    chat = Chat(tokenizer)
    rng = np.random.default_rng(0)
    traces = [draw_trace(rng) for _ in range(60)]
    assert any(not turn.learn for trace in traces for turn in trace.turns)
    for trace in traces:
        tokens, weights = cold_start.weigh(trace, chat, 0.1)
        assert len(tokens) == len(weights)
        said = sum(len(chat.assistant(turn.says)) for turn in trace.turns if turn.learn)
        erred = sum(len(chat.assistant(turn.says)) for turn in trace.turns if not turn.learn)
        assert (weights.count(1.0), weights.count(0.0)) == (said, erred)


def test_a_name_is_two_tokens_wherever_it_stands(repo: Path):
    """What a policy must copy has the same ids in an instruction, in a command and in a listing."""
    _, tokenizer = load_model(ModelConfig(str(repo / "recipes" / "tiny_model")))
    name = tokenizer.encode("kame", add_special_tokens=False)
    assert len(name) == 2
    for text in ("Sort kame.txt into", "cat kame.txt", "s/kame/", "\nkame\n", "> kame.txt"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert any(ids[i : i + 2] == name for i in range(len(ids))), text


def test_the_recipe_runs_and_goes_on_where_it_stopped(repo: Path, tmp_path: Path):
    def run(steps: int) -> None:
        recipe = ["recipes/cold_start.py", "recipes/tiny_cold_start.yaml", f"steps={steps}"]
        paths = [f"run_dir={tmp_path / 'run'}", f"out={tmp_path / 'model'}", "save_every=2", "warm_steps=2"]
        done = subprocess.run([sys.executable, *recipe, *paths], cwd=repo, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr

    run(2)
    run(4)
    load_model(ModelConfig(str(tmp_path / "model")))
    assert (tmp_path / "run" / "checkpoints" / "step_000004").is_dir()
