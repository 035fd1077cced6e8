"""Every gate against the corpus: a broken task fails at the gate that is there for it and at no other; a sound one
raises no alarm."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from rsi.admission.command import CommandConfig
from rsi.admission.start_state import Eyes
from rsi.admission.validate import ALL_GATES, Validation, validate_fully
from rsi.harbor.grade import Grader
from rsi.sandbox import build_backend
from tests.corpus.broken import BROKEN, HELD_OUT
from tests.corpus.sound import SOUND
from tests.corpus.write import Files

CONFIG = CommandConfig()
Judge = Callable[[Files], Validation]


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    """Passes a task through all gates; one backend for the whole corpus, as `rsi validate` has for its tasks."""
    with asyncio.Runner() as runner:

        async def open_all() -> tuple[Grader, Eyes]:
            backend = build_backend(CONFIG.sandbox)
            return Grader(backend), Eyes(backend)

        grader, eyes = runner.run(open_all())
        yield lambda files: runner.run(validate_fully(files, grader, HELD_OUT, CONFIG.admission, eyes))
        runner.run(grader.backend.close())


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_task_fails_at_its_gate(name: str, judge: Judge) -> None:
    broken = BROKEN[name]
    validation = judge(broken.files)
    failed = {gate.name: gate.reason for gate in validation.gates if gate.passed is False}
    assert broken.gate in failed, validation
    assert failed.keys() <= {broken.gate, *broken.also}
    assert all(failed.values()), "a gate that fails says why"


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_task_passes_every_gate(name: str, judge: Judge) -> None:
    validation = judge(SOUND[name]())
    assert validation.complaint == "" and validation.valid is True
    assert [gate.name for gate in validation.gates if gate.passed] == [gate for gate in ALL_GATES if gate != "rubric"]


def test_the_corpus_is_as_large_as_it_says() -> None:
    assert len(SOUND) >= 40 and len(BROKEN) >= 70
    assert {broken.gate for broken in BROKEN.values()} == {*ALL_GATES} - {"rubric"}
