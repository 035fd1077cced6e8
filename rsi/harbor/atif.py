"""Trajectories in ATIF v1.8 (harbor.md section 10): written, read from v1.0 on, and made from our own.

Every object of the format forbids keys that it does not know, so reading refuses them. Our rollouts keep their token
ids and logprobs: an agent step's metrics hold the whole prompt of its call, as other readers expect, and `turns` takes
what was new in each prompt back out of it. What tokens mean is the caller's: a decode function, and optionally one
that splits a reply into text, reasoning and tool calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from rsi.harbor.records import FormatError, read_json, read_record, to_json
from rsi.types import Trajectory, Turn

Version = Literal[
    "ATIF-v1.0", "ATIF-v1.1", "ATIF-v1.2", "ATIF-v1.3", "ATIF-v1.4", "ATIF-v1.5", "ATIF-v1.6", "ATIF-v1.7", "ATIF-v1.8"
]
Extra = Mapping[str, Any]
_AUDIO_ALIASES = {
    **dict.fromkeys(("audio/mp3", "audio/mpga", "audio/x-mpeg"), "audio/mpeg"),
    **dict.fromkeys(("audio/x-wav", "audio/wave", "audio/vnd.wave"), "audio/wav"),
    **dict.fromkeys(("audio/x-m4a", "audio/m4a"), "audio/mp4"),
    "audio/x-aac": "audio/aac",
    "audio/x-flac": "audio/flac",
    "audio/x-aiff": "audio/aiff",
}
"""Spellings that producers use, and the registered one."""


# ---- records ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MediaSource:
    """A file or URL; duration_sec of audio only."""

    media_type: Literal[
        "image/jpeg", "image/png", "image/gif", "image/webp",
        "audio/wav", "audio/mpeg", "audio/mp4", "audio/aac", "audio/ogg", "audio/flac", "audio/webm", "audio/aiff",
    ]  # fmt: skip
    path: str
    duration_sec: float | None = None

    def __post_init__(self) -> None:
        if self.duration_sec is not None and (self.media_type.startswith("image/") or self.duration_sec < 0):
            raise ValueError("duration_sec is the length of audio, 0 or more")


@dataclass(frozen=True)
class ContentPart:
    type: Literal["text", "image", "audio"]
    text: str | None = None
    source: MediaSource | None = None

    def __post_init__(self) -> None:
        if self.type == "text":
            if self.text is None or self.source is not None:
                raise ValueError("a text part has a text and no source")
        elif self.source is None or self.text is not None or not self.source.media_type.startswith(self.type):
            raise ValueError(f"a part of type {self.type} has a source of that type and no text")


Content = str | tuple[ContentPart, ...]


@dataclass(frozen=True)
class ToolCall:
    tool_call_id: str
    function_name: str
    arguments: Mapping[str, Any]
    extra: Extra | None = None


@dataclass(frozen=True)
class SubagentRef:
    """By id among the embedded trajectories, or by path."""

    trajectory_id: str | None = None
    session_id: str | None = None
    trajectory_path: str | None = None
    extra: Extra | None = None

    def __post_init__(self) -> None:
        if self.trajectory_id is None and self.trajectory_path is None and self.session_id is None:
            raise ValueError("a reference to a subagent has neither trajectory_id nor trajectory_path")


@dataclass(frozen=True)
class ObservationResult:
    source_call_id: str | None = None
    content: Content | None = None
    subagent_trajectory_ref: tuple[SubagentRef, ...] | None = None
    extra: Extra | None = None


@dataclass(frozen=True)
class Observation:
    results: tuple[ObservationResult, ...]


@dataclass(frozen=True)
class Metrics:
    """Of one call of the model. prompt_token_ids: the whole prompt; logprobs: of completion_token_ids, nats."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: float | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    completion_token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    extra: Extra | None = None


@dataclass(frozen=True)
class Step:
    step_id: int
    source: Literal["system", "user", "agent"]
    message: Content
    timestamp: str | None = None
    model_name: str | None = None
    reasoning_effort: str | float | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None
    extra: Extra | None = None

    def __post_init__(self) -> None:
        if self.timestamp is not None:
            datetime.fromisoformat(self.timestamp.replace("Z", "+00:00"))
        if self.llm_call_count is not None and self.llm_call_count < 0:
            raise ValueError("llm_call_count is below 0")
        agents = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics")
        models = ("metrics", "reasoning_content") if self.llm_call_count == 0 else ()
        for key in agents if self.source != "agent" else models:
            if getattr(self, key) is not None:
                reason = "no model was called" if self.source == "agent" else f"its source is {self.source}"
                raise ValueError(f"a step has {key} although {reason}")
        calls = {call.tool_call_id for call in self.tool_calls or ()}
        for result in self.observation.results if self.observation else ():
            if result.source_call_id is not None and result.source_call_id not in calls:
                raise ValueError(f"an observation is of {result.source_call_id!r}, which the step did not call")


@dataclass(frozen=True)
class Agent:
    name: str
    version: str
    model_name: str | None = None
    tool_definitions: tuple[Mapping[str, Any], ...] | None = None
    extra: Extra | None = None


@dataclass(frozen=True)
class FinalMetrics:
    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_cached_tokens: int | None = None
    total_cost_usd: float | None = None
    total_steps: int | None = None
    extra: Extra | None = None


@dataclass(frozen=True)
class AtifTrajectory:
    """One trajectory document; subagents may be embedded."""

    agent: Agent
    steps: tuple[Step, ...]
    schema_version: Version = "ATIF-v1.8"
    session_id: str | None = None
    trajectory_id: str | None = None
    notes: str | None = None
    final_metrics: FinalMetrics | None = None
    continued_trajectory_ref: str | None = None
    extra: Extra | None = None
    subagent_trajectories: tuple[AtifTrajectory, ...] | None = None

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError("a trajectory has at least one step")
        for number, step in enumerate(self.steps, start=1):
            if step.step_id != number:
                raise ValueError(f"steps[{number - 1}].step_id is {step.step_id}; steps count from 1 without gaps")
        ids = [subagent.trajectory_id for subagent in self.subagent_trajectories or ()]
        if None in ids or len(set(ids)) < len(ids):
            raise ValueError("every embedded subagent needs a trajectory_id of its own")


# ---- reading and writing ---------------------------------------------------------------------------------------------


def parse_atif(content: bytes | str) -> AtifTrajectory:
    """A trajectory.json of any version so far. Raises FormatError."""
    return atif_from_table(read_json(content, "trajectory.json"))


def atif_from_table(table: Any) -> AtifTrajectory:
    return read_record(AtifTrajectory, _with_registered_types(table))


def atif_json(trajectory: AtifTrajectory) -> bytes:
    return to_json(trajectory)


def _with_registered_types(value: Any) -> Any:
    """Audio types as they are registered, wherever a media source stands."""
    if isinstance(value, list):
        return [_with_registered_types(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) <= {"media_type", "path", "duration_sec"} and isinstance(value.get("media_type"), str):
        named = value["media_type"].strip().lower()
        return {**value, "media_type": _AUDIO_ALIASES.get(named, named)}
    kept = ("arguments", "extra", "tool_definitions")  # what stands there is the producer's own
    return {key: item if key in kept else _with_registered_types(item) for key, item in value.items()}


# ---- our trajectories ------------------------------------------------------------------------------------------------

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Reply:
    """A sampled text, taken apart. calls: (function, arguments)."""

    message: str
    reasoning: str = ""
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()


def atif_of(
    trajectory: Trajectory,
    decode: Decode,
    agent: Agent,
    *,
    split: Callable[[str], Reply] = Reply,
    reward: float | None = None,
) -> AtifTrajectory:
    """A rollout of ours as ATIF, with token ids and logprobs of every turn.

    decode: token ids -> text, special tokens included. split: takes a sampled text apart; the default leaves it whole.
    What was shown after a turn with tool calls becomes that turn's observation, else a step of the user.
    """
    steps: list[Step] = []
    prompt: tuple[int, ...] = ()
    for turn in trajectory.turns:
        prompt += turn.observed
        _add_shown(steps, decode(turn.observed) if turn.observed else "")
        reply = split(decode(turn.sampled))
        calls = tuple(
            ToolCall(f"call_{len(steps) + 1}_{number}", name, arguments)
            for number, (name, arguments) in enumerate(reply.calls, start=1)
        )
        steps.append(
            Step(
                len(steps) + 1,
                "agent",
                reply.message,
                reasoning_content=reply.reasoning or None,
                tool_calls=calls or None,
                metrics=_metrics(turn, prompt),
                llm_call_count=1,
            )
        )
        prompt += turn.sampled
    if not steps:
        raise FormatError(f"trajectory {trajectory.id} has no turns, and ATIF has no trajectory without steps")
    return AtifTrajectory(
        agent,
        tuple(steps),
        session_id=trajectory.id,
        trajectory_id=trajectory.id,
        final_metrics=_final_metrics(steps),
        extra={"task": trajectory.task, "role": trajectory.role, "stop": trajectory.stop.value}
        | ({} if reward is None else {"reward": reward}),
    )


def _add_shown(steps: list[Step], text: str) -> None:
    if not text:
        return
    before = steps[-1] if steps else None
    if before is None or not before.tool_calls:
        steps.append(Step(len(steps) + 1, "user", text))
        return
    call_id = before.tool_calls[0].tool_call_id if len(before.tool_calls) == 1 else None
    steps[-1] = replace(before, observation=Observation((ObservationResult(call_id, text),)))


def _metrics(turn: Turn, prompt: tuple[int, ...]) -> Metrics:
    return Metrics(
        prompt_tokens=len(prompt),
        completion_tokens=len(turn.sampled),
        prompt_token_ids=prompt,
        completion_token_ids=turn.sampled,
        logprobs=turn.logprobs,
        extra={"version_min": turn.version_min, "version_max": turn.version_max},
    )


def _final_metrics(steps: Sequence[Step]) -> FinalMetrics:
    metrics = [step.metrics for step in steps if step.metrics]
    return FinalMetrics(
        total_prompt_tokens=sum(each.prompt_tokens or 0 for each in metrics),
        total_completion_tokens=sum(each.completion_tokens or 0 for each in metrics),
        total_steps=len(steps),
    )


def turns(trajectory: AtifTrajectory) -> tuple[Turn, ...]:
    """The turns of a trajectory that has token ids: what was new in each prompt, and what was sampled.

    Steps that were copied from another trajectory count as shown, never as sampled, so nobody trains on them. Raises
    FormatError where ids or logprobs are missing, or a prompt does not continue the one before (a rewritten history is
    several trajectories).
    """
    found: list[Turn] = []
    known: tuple[int, ...] = ()
    for step in trajectory.steps:
        if step.source != "agent" or step.is_copied_context or step.llm_call_count == 0:
            continue
        metrics = step.metrics
        if metrics is None or metrics.prompt_token_ids is None or metrics.completion_token_ids is None:
            raise FormatError(f"step {step.step_id} has no token ids; only a rollout that kept them can be read back")
        sampled, logprobs = metrics.completion_token_ids, metrics.logprobs
        if logprobs is None or len(logprobs) != len(sampled):
            raise FormatError(f"step {step.step_id} has {len(logprobs or ())} logprobs of {len(sampled)} tokens")
        if metrics.prompt_token_ids[: len(known)] != known:
            raise FormatError(f"the prompt of step {step.step_id} does not continue the one before; split it there")
        version = metrics.extra or {}
        found.append(
            Turn(
                metrics.prompt_token_ids[len(known) :],
                sampled,
                logprobs,
                int(version.get("version_min", 0)),
                int(version.get("version_max", 0)),
            )
        )
        known = metrics.prompt_token_ids + sampled
    return tuple(found)


def rollout_details(trajectory: AtifTrajectory) -> dict[str, Any]:
    """The same ids and logprobs as `agent_result.rollout_details[0]` of a trial's result has them, by turn."""
    metrics = [step.metrics for step in trajectory.steps if step.metrics and step.metrics.completion_token_ids]
    return {
        "prompt_token_ids": tuple(each.prompt_token_ids or () for each in metrics),
        "completion_token_ids": tuple(each.completion_token_ids or () for each in metrics),
        "logprobs": tuple(each.logprobs or () for each in metrics),
    }
