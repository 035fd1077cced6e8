"""Cold start: from nothing to a model that speaks both roles, by imitation of traces that a program writes.

    python recipes/cold_start.py recipes/tiny_cold_start.yaml [key=value ...]

It trains a tokenizer, makes a Qwen3-MoE with random weights, imitates `rsi.domains.terminal_traces`, and writes the
model in bfloat16 to `out`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rsi.chat import Chat
from rsi.config import ConfigError, load, parse_argv
from rsi.domains.terminal import CONSONANTS, draw_chain
from rsi.domains.terminal_traces import Trace, draw_solver_trace, draw_trace, solver_trace
from rsi.loss import LossConfig
from rsi.pack import pack
from rsi.run import RunDir
from rsi.trainer import ModelConfig, TrainerConfig, build_trainer
from rsi.types import Batch, Sample

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens of Qwen's chat layout; like there, the markers are whole tokens but not special ones."""


@dataclass(frozen=True)
class ShapeConfig:
    """The `shape:` block: a Qwen3-MoE. Defaults: 1.6 M parameters."""

    vocab_size: int = 1536
    """Byte-level BPE; the traces need no more."""
    hidden_size: int = 128
    layers: int = 4
    experts: int = 8
    experts_per_token: int = 2
    max_len: int = 2048
    init_std: float = 0.08
    """Of all weights; about 1 / sqrt(hidden_size). With transformers' 0.02, names were copied worse after 4,500 steps
    than with this after 3,500."""


@dataclass(frozen=True)
class ColdStartConfig:
    steps: int
    """Optimizer steps."""
    seed: int = 0
    run_dir: str = ""
    """Empty: runs/<name of the recipe>."""
    out: str = ""
    """Where the finished model goes, in bfloat16; empty: <run_dir>/model."""
    shape: ShapeConfig = ShapeConfig()
    traces_per_step: int = 8
    """Few, and many steps: copying names appears after a number of steps rather than of tokens."""
    warm_steps: int = 400
    """First steps, on single chores read aloud, in which the model learns to copy."""
    solver_steps: int = 2000
    """Steps after those on the solver's traces alone; the proposer's longer ones undo copying that is not yet firm."""
    context_weight: float = 0.1
    """Loss weight of what the policy reads; what it says has 1, a turn that is a mistake 0."""
    save_every: int = 500
    trainer: TrainerConfig = TrainerConfig(lr=2e-3, weight_decay=0.01, warmup_steps=50)


def cold_start(config: ColdStartConfig, run: RunDir) -> Path:
    model = run.path / "init"
    if not (model / "config.json").is_file():
        init_model(config, model)
    policy = build_trainer(ModelConfig(str(model)), config.trainer, LossConfig(loss="sft"))
    if latest := run.latest():
        policy.load(latest[1] / "policy")
    chat = Chat(policy.tokenizer)
    for step in range(policy.version, config.steps):
        rng = np.random.default_rng([config.seed, step])
        traces = [draw(config, step, rng) for _ in range(config.traces_per_step)]
        metrics = policy.update(to_batch(traces, chat, config.context_weight))
        if (step + 1) % config.save_every == 0 or step + 1 == config.steps or run.stop_requested:
            run.log(step, metrics)
            run.save(step + 1, lambda directory: policy.save(directory / "policy"), {})
        if run.stop_requested:
            sys.exit(f"stopped after step {step + 1}; the same command goes on from there")
    out = Path(config.out) if config.out else run.path / "model"
    export(policy, out)
    return out


def draw(config: ColdStartConfig, step: int, rng: np.random.Generator) -> Trace:
    if step >= config.warm_steps + config.solver_steps:
        return draw_trace(rng)
    if step >= config.warm_steps:
        return draw_solver_trace(rng)
    return solver_trace(draw_chain(1, "seed", rng), rng, asides=False, aloud=1.0)


def to_batch(traces: Sequence[Trace], chat: Chat, context_weight: float) -> Batch:
    """One sample a trace; the loss weight of each token stands where reinforcement learning has its advantage."""
    rows = [weigh(trace, chat, context_weight) for trace in traces]
    samples = [
        Sample(tokens, (False, *(w > 0 for w in weights[1:])), (0.0,) * len(tokens), 1.0, trace.role, 0)
        for trace, (tokens, weights) in zip(traces, rows, strict=True)
    ]
    shifted = [np.append(weights[1:], 0.0) for _, weights in rows]
    return replace(pack(samples), advantages=np.concatenate(shifted).astype(np.float32))


def weigh(trace: Trace, chat: Chat, context_weight: float) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Ids of a trace and the weight of each: 1 where the policy speaks, 0 where it errs, context_weight elsewhere."""
    tokens = chat.prompt(trace.system, trace.user)
    weights = (context_weight,) * len(tokens)
    for turn in trace.turns:
        said = chat.assistant(turn.says)
        tokens, weights = tokens + said, weights + (float(turn.learn),) * len(said)
        if turn.result is not None:
            shown = (chat.user_message if turn.from_user else chat.observation)(turn.result, said)
            tokens, weights = tokens + shown, weights + (context_weight,) * len(shown)
    return tokens, weights


# ---- the model before it has learned anything -------------------------------------------------------------------


def init_model(config: ColdStartConfig, directory: Path) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = train_tokenizer(config.shape.vocab_size, np.random.default_rng(config.seed))
    shape = config.shape
    heads = shape.hidden_size // 32
    model_config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=2 * shape.hidden_size,
        moe_intermediate_size=3 * shape.hidden_size // 4,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=32,  # pyright: ignore[reportCallIssue]
        num_experts=shape.experts,
        num_experts_per_tok=shape.experts_per_token,
        norm_topk_prob=True,
        max_position_embeddings=shape.max_len,
        initializer_range=shape.init_std,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(config.seed)
    Qwen3MoeForCausalLM(model_config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def train_tokenizer(vocab_size: int, rng: np.random.Generator) -> Any:
    """Byte-level BPE whose tokens may cross spaces but never the border of a syllable.

    A whole phrase becomes a token or two, which keeps an episode near 100 tokens; a name stays two, which the held-out
    words share with those of the seeds.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    first, second = f"[{CONSONANTS}][aou]", f"[{CONSONANTS}][ei]"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(f"(?<![a-z]){first}{second}(?![a-z])"), "isolated"),
            pre_tokenizers.Split(Regex(f"^{first}(?={second}$)"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKERS),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=20,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(4000, rng), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    markers: Any = [AddedToken(marker, special=False, normalized=False) for marker in MARKERS]
    fast.add_tokens(markers)
    fast.chat_template = Path(__file__).with_name("tiny_chat_template.jinja").read_text()
    return fast


def texts(num: int, rng: np.random.Generator) -> Iterator[str]:
    for _ in range(num):
        trace = draw_trace(rng)
        yield from (trace.system, trace.user, "system\n", "user\n", "assistant\n")
        for turn in trace.turns:
            yield from turn.says.removesuffix(MARKERS[1]).split(MARKERS[0])
            yield turn.result or ""


def export(policy: Any, out: Path) -> None:
    from rsi.trainer.checkpoint import export_bf16

    export_bf16(policy.model, policy.tokenizer, out)
    print(f"wrote {out}")


def main(argv: list[str]) -> None:
    path, overrides = parse_argv(argv)
    config = load(ColdStartConfig, path, overrides)
    with RunDir(Path(config.run_dir or f"runs/{path.stem}"), config) as run:
        cold_start(config, run)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ConfigError, ValueError, RuntimeError, OSError) as error:
        sys.exit(f"cold_start: {error}")
