"""What the traces claim that the sandbox and the host answer, held against a real sandbox and the real host."""

import asyncio
import re

import numpy as np
import pytest

from rsi.admission.calibrate import CalibrateConfig
from rsi.admission.evidence import AdmissionConfig
from rsi.chat import Call, parse_call
from rsi.domains.terminal import Chain, draw_chain, write_chain
from rsi.domains.terminal_traces import ASIDES, Trace, assignment_of, draw_trace, proposer_trace, solver_trace
from rsi.episode import observation_text
from rsi.harbor.image import image_spec
from rsi.harbor.task import task_from_files
from rsi.propose import ProposeConfig, propose
from rsi.propose.admit import open_admission
from rsi.rewards import RewardConfig
from rsi.sandbox import SandboxConfig, build_backend
from rsi.sandbox.shell import shell
from rsi.types import Direction
from tests.roles import LIMITS, observations, site_of

WORD = re.compile(r"\b[bdfgklmnprst][aou][bdfgklmnprst][ei]\b")


def test_solver_traces_show_what_the_sandbox_answers():
    async def check() -> int:
        backend, turns = build_backend(SandboxConfig()), 0
        try:
            for seed in range(30):
                rng = np.random.default_rng(seed)
                chain = draw_chain(1 + seed % 2, "seed", rng)
                sandbox = await backend.create(
                    await backend.build(image_spec(task_from_files(write_chain(chain), "terminal")))
                )
                for turn in solver_trace(chain, rng).turns:
                    call = parse_call(turn.says)
                    if isinstance(call, Call):
                        turns += 1
                        result = await shell(sandbox, call.command, timeout_s=10, cwd="/app")
                        assert observation_text(result) == turn.result, call.command
                await sandbox.close()
        finally:
            await backend.close()
        return turns

    assert asyncio.run(check()) > 45


def proposer_traces(direction: Direction, num: int) -> list[tuple[Chain, Trace]]:
    """Without revisions: what calibration says is the solver's matter."""
    found = []
    rng = np.random.default_rng(11)
    while len(found) < num:
        chain = draw_chain(1 + len(found) % 2, "seed", rng)
        trace = proposer_trace(chain, direction, rng)
        if not any(turn.from_user for turn in trace.turns):
            found.append((chain, trace))
    return found


@pytest.mark.parametrize("direction", ["harden", "simplify", "explore"])
def test_proposer_traces_show_what_the_host_answers(direction: Direction):
    """The trace's turns are said again in a real workspace, with the host's own tools behind it."""

    async def check(chain: Chain, trace: Trace) -> None:
        says = [turn.says for turn in trace.turns]
        script = lambda context: (  # noqa: E731
            says[context.count("<|im_start|>assistant\n") - 1] if "[proposer]" in context else "Done."
        )
        async with site_of(script) as site:
            admission = open_admission(
                site, AdmissionConfig(), CalibrateConfig(), LIMITS, held_out=None, known=[], step=0, seed=0
            )
            assignment = assignment_of(chain, direction, np.random.default_rng(0))
            config = ProposeConfig(assignments=1, attempts=1, max_revisions=0, train=False, episode=LIMITS)
            result = await propose(
                site, [assignment], admission, config, step=0, seed=0, memory={}, rewards=RewardConfig()
            )
        [proposal] = result.proposals
        assert observations(proposal.trajectory) == [turn.result for turn in trace.turns[:-1]]
        assert proposal.ruling.outcome == "rejected", "a valid task that a solver which does nothing cannot do"

    for chain, trace in proposer_traces(direction, 4):
        asyncio.run(check(chain, trace))


def test_mistaken_turns_are_shown_and_never_learned():
    rng = np.random.default_rng(2)
    turns = [turn for _ in range(300) for turn in draw_trace(rng).turns]
    failed = [turn for turn in turns if turn.result and ("[exit " in turn.result) and "reference:" not in turn.result]
    assert len(failed) > 5 and not any(turn.learn for turn in failed)


def test_no_trace_solves_a_task_deeper_than_the_seeds():
    rng = np.random.default_rng(4)
    traces = [draw_trace(rng) for _ in range(400)]
    solved = [trace.user.splitlines() for trace in traces if trace.role == "solver"]
    asides = tuple(text.replace("{w}", "") for text in ASIDES)
    chores = [[line for line in lines if WORD.sub("", line, count=1) not in asides] for lines in solved]
    assert {len(lines) for lines in chores} == {1, 2} and {len(lines) for lines in solved} == {1, 2, 3, 4, 5}


def test_reading_aloud_says_every_line_once_in_order_and_nothing_else():
    for seed in range(40):
        rng = np.random.default_rng(seed)
        trace = solver_trace(draw_chain(1 + seed % 2, "seed", rng), rng, aloud=1.0)
        said = "".join(turn.says.split("<tool_call>")[0] for turn in trace.turns)
        assert said == f"{trace.user}\nDone."
