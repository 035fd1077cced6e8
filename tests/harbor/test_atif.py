import json

import pytest

from rsi.harbor.atif import (
    Agent,
    AtifTrajectory,
    Reply,
    Step,
    atif_from_table,
    atif_json,
    atif_of,
    parse_atif,
    rollout_details,
    turns,
)
from rsi.harbor.records import FormatError
from rsi.types import Stop, Trajectory, Turn

TURNS = (
    Turn((1, 2, 3), (4, 5), (-0.1, -0.2), 7, 7),
    Turn((6,), (7,), (-0.3,), 7, 8),
    Turn((), (8, 9), (-0.4, -0.5), 8, 8),
)
OURS = Trajectory("solve-1", "sha256:0", "solver", TURNS, Stop.DONE)
AGENT = Agent("rsi", "0.1", "tiny")


def words(ids) -> str:
    return " ".join(f"w{i}" for i in ids)


def minimal(**step) -> dict:
    return {
        "agent": {"name": "a", "version": "1"},
        "steps": [{"step_id": 1, "source": "agent", "message": "m", **step}],
    }


def test_a_rollout_becomes_atif_and_comes_back_with_every_id_and_logprob() -> None:
    made = atif_of(OURS, words, AGENT, reward=1.0)
    assert [(step.source, step.message) for step in made.steps] == [
        ("user", "w1 w2 w3"),
        ("agent", "w4 w5"),
        ("user", "w6"),
        ("agent", "w7"),
        ("agent", "w8 w9"),
    ]
    assert made.steps[3].metrics is not None and made.steps[3].metrics.prompt_token_ids == (1, 2, 3, 4, 5, 6)
    assert made.extra == {"task": "sha256:0", "role": "solver", "stop": "done", "reward": 1.0}
    read = parse_atif(atif_json(made))
    assert read == made
    assert turns(read) == TURNS
    assert rollout_details(read)["completion_token_ids"] == ((4, 5), (7,), (8, 9))


def test_a_reply_is_taken_apart_and_what_its_call_brought_is_its_observation() -> None:
    def split(text: str) -> Reply:
        return Reply("say", "think", (("bash", {"command": text}),)) if text == "w4 w5" else Reply(text)

    made = atif_of(OURS, words, AGENT, split=split)
    step = made.steps[1]
    assert (step.message, step.reasoning_content) == ("say", "think")
    assert step.tool_calls is not None and step.tool_calls[0].arguments == {"command": "w4 w5"}
    assert step.observation is not None and step.observation.results[0].content == "w6"
    assert step.observation.results[0].source_call_id == step.tool_calls[0].tool_call_id
    assert [step.source for step in made.steps] == ["user", "agent", "agent", "agent"]
    assert turns(parse_atif(atif_json(made))) == TURNS


def test_copied_steps_are_shown_and_never_sampled() -> None:
    table = json.loads(atif_json(atif_of(OURS, words, AGENT)))
    table["steps"][1]["is_copied_context"] = True
    first, second = turns(atif_from_table(table))
    assert first.observed == (1, 2, 3, 4, 5, 6) and first.sampled == (7,)
    assert second == TURNS[2]


def test_what_cannot_be_read_back_as_turns_says_why() -> None:
    table = json.loads(atif_json(atif_of(OURS, words, AGENT)))
    metrics = table["steps"][3]["metrics"]
    for change, complaint in (
        ({"prompt_token_ids": [9]}, "does not continue"),
        ({"logprobs": [-0.1, -0.1]}, "2 logprobs of 1 tokens"),
        ({"completion_token_ids": None}, "no token ids"),
    ):
        table["steps"][3]["metrics"] = {**metrics, **change}
        with pytest.raises(FormatError, match=complaint):
            turns(atif_from_table(table))
    with pytest.raises(FormatError, match="has no turns"):
        atif_of(Trajectory("t", "k", "solver", (), Stop.FAULT), words, AGENT)


@pytest.mark.parametrize("minor", range(9))
def test_every_version_so_far_is_read(minor: int) -> None:
    assert atif_from_table({**minimal(), "schema_version": f"ATIF-v1.{minor}"}).schema_version == f"ATIF-v1.{minor}"


@pytest.mark.parametrize(
    "table, complaint",
    [
        ({**minimal(), "schema_version": "ATIF-v2.0"}, "schema_version is not one of"),
        ({**minimal(), "more": 1}, "more is no key"),
        (minimal(mesage="m"), "did you mean message"),
        (minimal(step_id=2), "count from 1"),
        ({**minimal(), "steps": []}, "at least one step"),
        (minimal(source="robot"), "source is not one of"),
        (minimal(source="user", reasoning_content="r"), "reasoning_content although its source is user"),
        (minimal(llm_call_count=0, metrics={}), "although no model was called"),
        (minimal(llm_call_count=-1), "below 0"),
        (minimal(timestamp="noon"), "isoformat"),
        (minimal(observation={"results": [{"source_call_id": "c"}]}), "which the step did not call"),
        (minimal(message=[{"type": "text"}]), "a text part has a text"),
        (minimal(message=[{"type": "image", "source": {"media_type": "audio/wav", "path": "p"}}]), "of that type"),
        (minimal(message=[{"type": "image", "source": {"media_type": "image/tiff", "path": "p"}}]), "media_type"),
        ({**minimal(), "subagent_trajectories": [minimal()]}, "trajectory_id of its own"),
        ({**minimal(), "subagent_trajectories": [{**minimal(), "trajectory_id": "x"}] * 2}, "trajectory_id of its own"),
    ],
)
def test_a_rule_that_is_broken_is_told(table: dict, complaint: str) -> None:
    with pytest.raises(FormatError, match=complaint):
        atif_from_table(table)


def test_audio_is_read_by_its_usual_names_and_calls_are_left_alone() -> None:
    audio = {"type": "audio", "source": {"media_type": "audio/MP3", "path": "a", "duration_sec": 2}}
    call = {"tool_call_id": "c", "function_name": "f", "arguments": {"media_type": "audio/mp3", "path": "a"}}
    [step] = atif_from_table(minimal(message=[audio], tool_calls=[call])).steps
    assert not isinstance(step.message, str)
    assert step.message[0].source is not None and step.message[0].source.media_type == "audio/mpeg"
    assert step.tool_calls is not None and step.tool_calls[0].arguments["media_type"] == "audio/mp3"


def test_infinities_are_not_written() -> None:
    made = AtifTrajectory(AGENT, (Step(1, "user", "x"),), extra={"x": float("inf")})
    with pytest.raises(ValueError):
        atif_json(made)
