"""What the tests of both roles share: a small real tokenizer in Qwen's layout, one task, and scripted policies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rsi.chat import Chat, call_text
from rsi.engine.scripted import Script, ScriptedEngine, replay
from rsi.episode import EpisodeLimits
from rsi.harbor.grade import Grader
from rsi.harbor.task import new_task_files, task_from_files
from rsi.sandbox import SandboxConfig, build_backend
from rsi.solve import Site
from rsi.types import Task, Trajectory

TEMPLATE = (
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}"
    "{%- else %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}"
    "{{- '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = ['user assistant system tool_response tool_call name bash arguments command cat sort head > < | {} "\\n.'] * 8


@cache
def small_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of some 300 ids, so any bytes can be said."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    return fast


CHAT = Chat(small_tokenizer())


def scripted(script: Script | list[str]) -> ScriptedEngine:
    """A list is said turn by turn, by one episode; a function sees the context and serves any number."""
    return ScriptedEngine(small_tokenizer(), CHAT.end_id, replay(script) if isinstance(script, list) else script)


def one_call_each(commands: list[str]) -> Script:
    """The n-th episode to begin runs the n-th command, and then says that it is done."""
    left = list(commands)
    return lambda context: "Done." if "<tool_response>" in context else call_text(left.pop(0))


@asynccontextmanager
async def site_of(script: Script | list[str]) -> AsyncIterator[Site]:
    """A scripted policy in real sandboxes."""
    backend = build_backend(SandboxConfig())
    try:
        yield Site(scripted(script), CHAT, backend, Grader(backend))
    finally:
        await backend.close()


LIMITS = EpisodeLimits(max_turns=12, max_tokens=20_000, max_new=4_000, command_timeout_s=20.0, wall_s=120.0)
"""Wide: this tokenizer spells most words letter by letter."""

TESTS = b"""from pathlib import Path


def test_sorted():
    assert Path("out.txt").is_file(), "out.txt is missing"
    assert Path("out.txt").read_text() == "a\\nb\\nc\\n", "out.txt differs"


def test_first():
    assert Path("first.txt").is_file(), "first.txt is missing"
    assert Path("first.txt").read_text() == "a\\n", "first.txt differs"
"""
SORT = "sort in.txt > out.txt"
FIRST = "head -n 1 out.txt > first.txt"


def sort_files(**changes: bytes) -> dict[str, bytes]:
    """Two steps, one test each: sort in.txt to out.txt, its first line to first.txt."""
    return {
        **new_task_files("sort"),
        "instruction.md": b"Sort in.txt into out.txt.\nPut the first line of out.txt into first.txt.\n",
        "environment/files/in.txt": b"c\na\nb\n",
        "solution/solve.sh": f"#!/bin/bash\nset -e\n{SORT}\n{FIRST}\n".encode(),
        "tests/test_outputs.py": TESTS,
        **changes,
    }


def sort_task(files: Mapping[str, bytes] | None = None) -> Task:
    return task_from_files(sort_files() if files is None else files, domain="terminal")


def observations(trajectory: Trajectory) -> list[str]:
    """What came back after each turn but the last, without the frames around it."""
    texts = []
    for turn in trajectory.turns[1:]:
        text = CHAT.decode(turn.observed).partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        texts.append(text.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>"))
    return texts
