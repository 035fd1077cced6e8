"""What a verifier's /logs/verifier says: reward.json or reward.txt by harbor.md section 4, and ctrf.json beside it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rsi.sandbox import Entry, ExecResult
from rsi.types import TestResult, Verdict

MAX_REWARD_BYTES = 64 << 10
MAX_CTRF_BYTES = 256 << 10
MAX_LOG_CHARS = 2000
MAX_TESTS = 1000
MAX_MESSAGE_CHARS = 200


@dataclass(frozen=True)
class Graded:
    """rewards: every key of the reward file, which step thresholds may name; empty where there is no verdict."""

    verdict: Verdict
    rewards: Mapping[str, float]


def read_graded(logs: Mapping[str, Entry], done: ExecResult) -> Graded:
    """What /logs/verifier says; `done` gives the log and nothing else."""
    log = tail(done.stdout + b"\n" + done.stderr)
    rewards, complaint = read_rewards(logs)
    tests = _read_ctrf(logs.get("ctrf.json"))
    if complaint and done.oom:
        complaint += "; the verifier ran out of memory"
    text = f"{complaint}\n{log}".strip()[:MAX_LOG_CHARS] if complaint else log
    return Graded(Verdict(rewards.get("reward"), tests, text), rewards)


def read_rewards(logs: Mapping[str, Entry]) -> tuple[Mapping[str, float], str]:
    """({"reward": ...}, "") or ({}, what is wrong). reward.json comes first, reward.txt only where that is absent."""
    name = "reward.json" if "reward.json" in logs else "reward.txt"
    entry = logs.get(name)
    if entry is None:
        return {}, "the verifier wrote no reward"
    if entry.kind != "file" or len(entry.content) > MAX_REWARD_BYTES:
        return {}, f"{name} is not a regular file of at most {MAX_REWARD_BYTES} bytes"
    try:
        text = entry.content.decode()
        rewards = _json_rewards(text) if name == "reward.json" else {"reward": _plain_decimal(text)}
    except (ValueError, RecursionError, OverflowError) as error:
        return {}, f"{name} is not a reward: {str(error)[:100]}"
    value = rewards["reward"]
    if not math.isfinite(value) or not 0.0 <= value <= 1.0:
        return {}, f"{name} says {value}, which is outside [0, 1]"
    return rewards, ""


def _plain_decimal(text: str) -> float:
    stripped = text.strip()
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", stripped, re.ASCII):
        raise ValueError("write one plain decimal")
    return float(stripped)


def _json_rewards(text: str) -> dict[str, float]:
    parsed = json.loads(text)
    if not isinstance(parsed, dict) or "reward" not in parsed:
        raise ValueError('write an object with the key "reward"')
    if not all(isinstance(value, bool | int | float) and math.isfinite(value) for value in parsed.values()):
        raise ValueError("every value must be a finite number")
    return {key: float(value) for key, value in parsed.items()}


def _read_ctrf(entry: Entry | None) -> tuple[TestResult, ...]:
    """The tests of a ctrf.json; none where it is missing or malformed, since it decides nothing."""
    if entry is None or entry.kind != "file" or len(entry.content) > MAX_CTRF_BYTES:
        return ()
    try:
        tests = json.loads(entry.content)["results"]["tests"][:MAX_TESTS]
        return tuple(_read_test(test) for test in tests)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ()


def _read_test(test: Mapping[str, Any]) -> TestResult:
    name, message = str(test["name"])[:MAX_MESSAGE_CHARS], str(test.get("message") or "")[:MAX_MESSAGE_CHARS]
    return TestResult(name, test["status"] == "passed", message)


def tail(output: bytes) -> str:
    """The end of an output, as text of at most MAX_LOG_CHARS; the last lines are where an error stands."""
    return output.decode(errors="replace").strip()[-MAX_LOG_CHARS:]
