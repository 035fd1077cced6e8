import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rsi.admission.calibrate import CalibrateConfig
from rsi.admission.evidence import AdmissionConfig
from rsi.chat import call_text, proposer_message
from rsi.engine import EngineError
from rsi.engine.scripted import Script
from rsi.harbor.task import TaskError, new_task_files
from rsi.pool import Pool, PoolConfig
from rsi.propose import Proposal, ProposeConfig, ProposeResult, add_admitted, propose, without_twins
from rsi.propose.admit import Ruling, content_key, open_admission
from rsi.propose.one_shot import parse_blocks, question
from rsi.propose.workspace import WORKDIR, memory_files, open_workspace, workspace_files
from rsi.rewards import RewardConfig
from rsi.sandbox import ExecResult
from rsi.types import Assignment, Lineage, Stop, Task, Trajectory
from tests.roles import CHAT, FIRST, LIMITS, SORT, observations, one_call_each, site_of, sort_files, sort_task

PARENT = sort_task()
ASSIGNMENT = Assignment("a-1", "terminal", "harden", PARENT, 0.9, 16, "first.txt is missing")
CONFIG = ProposeConfig(assignments=1, attempts=1, train=False, episode=LIMITS, concurrency=1)

CHECK = "tools/snapshot-tests && tools/validate"
WRITE = """tools/new-task
cat > output/task/environment/files/in.txt <<'E'
c
a
b
E
cat > output/task/instruction.md <<'E'
Sort in.txt into out.txt.
Put the first line of out.txt into first.txt.
E
cat >> output/task/solution/solve.sh <<'E'
sort {source} > out.txt
head -n 1 out.txt > first.txt
E"""
GOOD = WRITE.format(source="in.txt")
HALVES = [SORT, f"{SORT}; {FIRST}", "true", SORT]
"""Four solver attempts that earn 0.5, 1, 0 and 0.5: in the band, and spread."""
ALL = f"{SORT}; {FIRST}"


def by_turn(texts: Sequence[str]) -> Script:
    """The n-th text in the n-th turn of any episode."""
    return lambda context: texts[context.count("<|im_start|>assistant\n") - 1]


def both_roles(proposer: Sequence[str], solver: Script) -> Script:
    """Proposer's texts turn by turn; bare commands become calls."""
    speak = by_turn([text if text.startswith(("Done", "===")) else call_text(text) for text in proposer])
    return lambda context: speak(context) if "[proposer]" in context else solver(context)


def run_round(
    script: Script,
    config: ProposeConfig = CONFIG,
    assignments: Sequence[Assignment] = (ASSIGNMENT,),
    known: Sequence[Task] = (),
    near_duplicate: float = 0.9,
) -> ProposeResult:
    async def run() -> ProposeResult:
        async with site_of(script) as site:
            admission = open_admission(
                site,
                AdmissionConfig(),
                CalibrateConfig(),
                LIMITS,
                held_out=None,
                known=known,
                near_duplicate=near_duplicate,
                step=2,
                seed=0,
            )
            return await propose(
                site, assignments, admission, config, step=2, seed=0, memory=memory_files([]), rewards=RewardConfig()
            )

    return asyncio.run(run())


def run_one(
    script: Script, config: ProposeConfig = CONFIG, known: Sequence[Task] = (), near_duplicate: float = 0.9
) -> Proposal:
    [proposal] = run_round(script, config, known=known, near_duplicate=near_duplicate).proposals
    return proposal


def test_an_agent_writes_a_task_mends_what_the_gate_found_and_is_admitted():
    turns = [
        "cat assignment/parent/instruction.md",
        WRITE.format(source="inn.txt"),
        CHECK,
        "sed -i s/inn/in/ output/task/solution/solve.sh",
        CHECK,
        "Done.",
    ]
    proposal = run_one(both_roles(turns, one_call_each(HALVES)))
    assert observations(proposal.trajectory) == [
        "Sort in.txt into out.txt.\nPut the first line of out.txt into first.txt.",
        "(no output)",
        "reference: sort: cannot read: inn.txt: No such file or directory\n[exit 1]",
        "(no output)",
        "wrote 2 tests\nvalid",
    ]
    ruling = proposal.ruling
    assert (ruling.outcome, ruling.message, proposal.revision) == ("admitted", "", 0)
    assert ruling.task is not None and ruling.calibration is not None
    assert ruling.task.lineage == Lineage(PARENT.id, "a-1", 0)
    assert sorted(ruling.calibration.rewards) == [0.0, 0.5, 0.5, 1.0]
    assert (proposal.trajectory.role, proposal.trajectory.task) == ("proposer", "a-1")


def test_a_task_that_is_too_easy_comes_back_and_its_revision_is_admitted():
    more = "cp output/task/environment/files/in.txt output/task/environment/files/two.txt; " + CHECK
    left = [*[ALL] * 4, *HALVES]
    proposal = run_one(both_roles([GOOD, CHECK, "Done.", more, "Done."], one_call_each(left)))
    report, again = observations(proposal.trajectory)[2:]
    assert (report, again) == ("Calibration: mean 1.00, too easy. Revise.", "wrote 2 tests\nvalid")
    assert (proposal.ruling.outcome, proposal.revision) == ("admitted", 1)
    assert proposal.ruling.task is not None and proposal.ruling.task.lineage.revision == 1


def test_revisions_end_and_the_reward_is_that_of_the_last():
    turns = [GOOD, CHECK, "Done.", "Done again.", "Done a third time."]
    result = run_round(both_roles(turns, one_call_each([ALL] * 4)))
    [proposal] = result.proposals
    # unchanged files are not calibrated again: the solver's script held four attempts only
    assert (proposal.ruling.outcome, proposal.revision) == ("rejected", 2)
    assert (proposal.trajectory.stop, len(proposal.trajectory.turns)) == (Stop.DONE, 5)
    assert result.measured[0].rewards == (-0.25,)
    assert (result.proposed, result.valid, len(result.admitted), result.num_faults) == (1, 1, 0, 0)


def test_an_empty_output_is_broken():
    result = run_round(both_roles(["Done."], one_call_each([])), replace(CONFIG, max_revisions=0))
    assert result.proposals[0].ruling.message == (
        "structure: output/task is empty; begin with tools/new-task or a copy of assignment/parent. Revise."
    )
    assert result.measured[0].rewards == (-1.0,)
    assert (result.proposed, result.valid) == (1, 0)


@pytest.mark.parametrize(
    "attack",
    [
        "ln -s /etc/passwd output/task/tests/passwd",
        "mkfifo output/task/pipe",
        "rm -rf output/task; ln -s / output/task",
        "rm -rf output/task; touch output/task",
        "rm -rf output",
        "head -c 30000000 /dev/zero > output/task/big",
        "for i in $(seq 300); do echo > output/task/tests/f$i; done",
        "ln -s ../../.. output/task/environment/files/up",
        r"touch output/task/$'a\nb' output/task/$'\xff'",
        "echo '[[steps]]' > output/task/task.toml",
    ],
)
def test_a_hostile_output_is_broken_and_not_a_crash(attack: str):
    turns = [GOOD, "tools/snapshot-tests", attack, "Done."]
    proposal = run_one(both_roles(turns, one_call_each([])), replace(CONFIG, max_revisions=0))
    assert (proposal.ruling.outcome, proposal.trajectory.stop) == ("broken", Stop.DONE)
    assert proposal.ruling.message.endswith(" Revise.")


def test_a_tool_that_nobody_answers_gives_up_by_itself():
    async def run() -> ExecResult:
        async with site_of([]) as site:
            sandbox = await open_workspace(site.backend, ASSIGNMENT, {}, tool_timeout_s=0.5)
            return await sandbox.exec("tools/validate", cwd=WORKDIR, timeout_s=20.0)

    result = asyncio.run(run())
    assert (result.stdout, result.exit_code, result.timed_out) == (b"the host does not answer\n", 124, False)


def test_an_agent_that_replaces_the_fifos_harms_only_itself():
    config = replace(CONFIG, episode=replace(LIMITS, command_timeout_s=4.0))
    spoil = "rm .host/request; head -c 5000 /dev/zero > .host/request; rm .host/reply; mkdir .host/reply; true"
    turns = [GOOD, CHECK, spoil, "tools/validate > /dev/null; true", "Done."]
    proposal = run_one(both_roles(turns, one_call_each(HALVES)), config)
    assert proposal.ruling.outcome == "admitted"


def test_tool_calls_are_limited():
    config = replace(CONFIG, max_tool_calls=2, max_revisions=0)
    turns = ["tools/validate", "tools/snapshot-tests", "tools/validate", "Done."]
    proposal = run_one(both_roles(turns, one_call_each([])), config)
    empty = "structure: output/task is empty; begin with tools/new-task or a copy of assignment/parent\n[exit 1]"
    assert observations(proposal.trajectory) == [empty, empty, "no calls left; 2 were granted\n[exit 2]"]


def test_words_that_are_no_tool_do_nothing():
    turns = [".host/ask 'rm -rf /'", "Done."]
    proposal = run_one(both_roles(turns, one_call_each([])), replace(CONFIG, max_revisions=0))
    assert observations(proposal.trajectory) == ["the tools are validate and snapshot-tests\n[exit 2]"]


def test_of_twins_in_a_group_the_first_is_admitted():
    script = both_roles([GOOD, CHECK, "Done."], one_call_each(HALVES))
    result = run_round(script, replace(CONFIG, attempts=2, concurrency=2, train=True))
    assert [proposal.ruling.outcome for proposal in result.proposals] == ["admitted", "rejected"]
    [group] = result.groups
    assert (group.role, group.key, group.rewards) == ("proposer", "a-1", (1.0, -0.25))


def test_a_copy_of_a_task_in_the_pool_is_a_duplicate_and_costs_no_calibration():
    copy = "cp -r assignment/parent/. output/task; sed -i s,rsi/sort,rsi/new, output/task/task.toml"
    proposal = run_one(both_roles([copy, "Done."], one_call_each([])), replace(CONFIG, max_revisions=0), known=[PARENT])
    assert (proposal.ruling.outcome, proposal.ruling.message) == (
        "duplicate",
        "The pool has this task already. Revise.",
    )


def test_a_task_that_differs_in_one_word_is_a_near_duplicate_and_costs_no_calibration():
    copy = "cp -r assignment/parent/. output/task; sed -i 's/first line/very first line/' output/task/instruction.md"
    script = both_roles([copy, CHECK, "Done."], one_call_each([]))
    config = replace(CONFIG, max_revisions=0)
    ruling = run_one(script, config, known=[PARENT], near_duplicate=0.6).ruling
    assert ruling.outcome == "duplicate" and re.fullmatch(
        r"The pool has a task that is \d\d% the same. Revise.", ruling.message
    )
    [gate, *_] = ruling.evidence()["gates"]
    assert gate == {"name": "structure", "passed": True, "reason": ""}


def test_a_task_that_is_too_hard_is_tried_once_with_the_reference_in_sight():
    def solver(context: str) -> str:
        hinted = "This script does it:" in context and "sort in.txt > out.txt" in context
        return "Done." if "<tool_response>" in context else call_text(ALL if hinted else "true")

    proposal = run_one(both_roles([GOOD, CHECK, "Done."], solver), replace(CONFIG, max_revisions=0))
    assert proposal.ruling.message == (
        "Calibration: mean 0.00, too hard. Shown the reference, the solver earned 1.00. Revise."
    )


def test_a_fault_of_the_solver_leaves_the_proposal_unmeasured_and_out_of_its_group():
    def solver(context: str) -> str:
        raise EngineError("no memory")

    result = run_round(both_roles([GOOD, CHECK, "Done."], solver))
    assert (result.proposals[0].ruling.outcome, result.measured, result.num_faults) == ("unmeasured", (), 1)
    assert (result.proposed, result.valid) == (0, 0)


def test_a_fault_of_the_engine_leaves_the_proposal_unmeasured():
    def script(context: str) -> str:
        raise EngineError("no memory")

    proposal = run_one(script)
    assert (proposal.ruling.outcome, proposal.trajectory.stop) == ("unmeasured", Stop.FAULT)


def test_an_episode_that_meets_a_limit_is_ruled_on_as_it_stands():
    config = replace(CONFIG, episode=replace(LIMITS, max_turns=2))
    proposal = run_one(both_roles([GOOD, CHECK], one_call_each(HALVES)), config)
    assert (proposal.ruling.outcome, proposal.trajectory.stop) == ("admitted", Stop.MAX_TURNS)


def test_what_was_mended_since_the_last_report_counts_when_a_limit_ends_the_episode():
    config = replace(CONFIG, episode=replace(LIMITS, max_turns=3))
    proposal = run_one(both_roles(["Done.", GOOD, CHECK], one_call_each(HALVES)), config)
    assert (proposal.ruling.outcome, proposal.revision, proposal.trajectory.stop) == ("admitted", 1, Stop.MAX_TURNS)


def test_a_frozen_proposer_gives_no_groups_to_train_on():
    script = both_roles([GOOD, CHECK, "Done."], one_call_each(HALVES))
    result = run_round(script, replace(CONFIG, attempts=2))
    assert (result.groups, result.measured[0].rewards) == ((), (1.0, -0.25))


def test_admitted_tasks_go_into_the_pool_with_what_was_measured(tmp_path: Path):
    result = run_round(both_roles([GOOD, CHECK, "Done."], one_call_each(HALVES)))
    pool = Pool(PoolConfig(), tmp_path)
    add_admitted(pool, result, step=2)
    [entry] = pool.entries
    assert (entry.mean, entry.added, entry.failure) == (0.5, 2, "first.txt is missing")


BLOCKS = f"""=== instruction.md
Sort in.txt into out.txt, and its first line into first.txt.
=== solution/solve.sh
#!/bin/bash
set -e
{SORT}
{FIRST}
=== environment/files/in.txt
c
a
b"""
PROMPT = replace(CONFIG, arm="prompt")


def test_one_completion_is_parsed_given_tests_and_admitted():
    proposal = run_one(both_roles([BLOCKS], one_call_each(HALVES)), PROMPT)
    assert proposal.ruling.outcome == "admitted"
    assert proposal.ruling.task is not None
    assert proposal.ruling.task.files["environment/files/in.txt"] == b"c\na\nb\n"
    [turn] = proposal.trajectory.turns
    prompt = CHAT.decode(turn.observed)
    assert "[proposer] Write one new task in a single answer" in prompt
    assert f"first.txt is missing.\n=== instruction.md\n{PARENT.instruction}\n=== solution/solve.sh\n" in prompt


def test_one_completion_is_never_sent_back():
    proposal = run_one(both_roles([BLOCKS.replace("sort in.txt", "sort inn.txt")], one_call_each([])), PROMPT)
    assert proposal.ruling.outcome == "broken"
    assert proposal.ruling.message == "reference: sort: cannot read: inn.txt: No such file or directory. Revise."
    assert len(proposal.trajectory.turns) == 1


def test_an_answer_without_files_is_broken():
    proposal = run_one(both_roles(["Done."], one_call_each([])), PROMPT)
    assert (proposal.ruling.outcome, proposal.ruling.message) == (
        "broken",
        "structure: the answer has no `=== path` line. Revise.",
    )


def test_blocks_lie_over_the_skeleton_of_a_new_task():
    files = parse_blocks("I think:\n=== a/b.txt\n\nx\n=\n=== instruction.md\ny", "terminal")
    assert files == {**new_task_files("terminal"), "a/b.txt": b"x\n=\n", "instruction.md": b"y\n"}
    with pytest.raises(TaskError, match="relative and plain"):
        parse_blocks("=== ../../etc/passwd\nx", "terminal")


def test_the_question_of_an_assignment_without_a_parent_is_one_line():
    explore = Assignment("a-2", "terminal", "explore", None, None, 0, "")
    assert question(explore) == proposer_message(explore) == "Direction: explore. Domain: terminal."


def test_the_workspace_holds_assignment_parent_skills_tools_and_memory():
    entries = workspace_files(ASSIGNMENT, memory_files([(PARENT, 0.5)]), tool_timeout_s=9.0)
    assert json.loads(entries["assignment/assignment.json"].content) == {
        "id": "a-1",
        "domain": "terminal",
        "direction": "harden",
        "parent": PARENT.id,
        "pass_rate": 0.9,
        "num_attempts": 16,
        "failure": "first.txt is missing",
    }
    assert entries["assignment/parent/instruction.md"].content == PARENT.files["instruction.md"]
    assert {"skills/build_a_task.md", "skills/teach_the_solver.md", "memory/lessons.md"} <= set(entries)
    assert json.loads(entries["memory/index.jsonl"].content) == {
        "id": PARENT.id,
        "pass_rate": 0.5,
        "instruction": PARENT.instruction,
    }
    assert entries["tools/validate"].content.endswith(b"exec /work/.host/ask validate\n")
    assert all(entries[f"tools/{tool}"].mode == 0o755 for tool in ("validate", "snapshot-tests", "new-task"))


def test_twins_have_the_same_content_under_other_names_limits_and_tests():
    renamed = sort_task(sort_files(**{"task.toml": new_task_files("other")["task.toml"]}))
    changed = sort_task(sort_files(**{"instruction.md": b"Sort in.txt.\n"}))
    assert renamed.id != PARENT.id and content_key(renamed) == content_key(PARENT) != content_key(changed)


def test_a_rejected_proposal_does_not_stand_in_the_way_of_its_twin():
    trajectory = Trajectory("i", "a-1", "proposer", (), Stop.DONE)
    outcomes = ("rejected", "admitted", "admitted", "broken")
    proposals = [
        Proposal(ASSIGNMENT, trajectory, Ruling(outcome, "", None if outcome == "broken" else PARENT), 0)
        for outcome in outcomes
    ]
    assert [p.ruling.outcome for p in without_twins(proposals, 0.9)] == ["rejected", "admitted", "rejected", "broken"]


def test_settings_that_cannot_work_are_refused_with_the_mend():
    with pytest.raises(ValueError, match="propose.train=false"):
        ProposeConfig(attempts=1)
    with pytest.raises(ValueError, match="leaves tools/validate no time"):
        ProposeConfig(episode=replace(LIMITS, command_timeout_s=2.0))
