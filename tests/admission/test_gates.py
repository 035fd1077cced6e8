"""What the corpus does not show of the gates: their thresholds, strict mode, and the parts that are pure functions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import pytest

from rsi.admission.basics import reaches_out
from rsi.admission.command import CommandConfig
from rsi.admission.contamination import HeldOut, contaminated
from rsi.admission.evidence import AdmissionConfig, GateName
from rsi.admission.leakage import in_history, in_instruction
from rsi.admission.stability import MovedBackend, Place, everywhere, places, shim_for_this_machine
from rsi.admission.start_state import Eyes, Seen, StartState
from rsi.admission.tampering import forged_programs
from rsi.admission.validate import ALL_GATES, Validation, validate, validate_fully
from rsi.admission.wrong_answers import altered_line, differs, mutants_of, sample, wrong_outputs
from rsi.harbor.grade import Grader
from rsi.harbor.task import task_from_files
from rsi.sandbox import Backend, Entry, ImageSpec, SandboxConfig, build_backend
from tests.corpus.broken import BROKEN
from tests.corpus.sound import SOUND, WORDS, sort_lines
from tests.corpus.write import Files, by_bash, task


def judge(with_grader, files: Files, gates: str = "", strict: bool = False, **config) -> Validation:
    wanted = CommandConfig(AdmissionConfig(gates=ALL_GATES, managed_verifier=False, **config))
    admission = wanted.narrowed(gates, strict, "").admission
    return with_grader(lambda grader, _: validate_fully(files, grader, config=admission))


def results(validation: Validation) -> dict[str, bool | None]:
    return {gate.name: gate.passed for gate in validation.gates}


# ---- which gates run


def test_every_gate_has_a_result_and_those_not_asked_for_say_so(with_grader) -> None:
    validation = judge(with_grader, sort_lines(), gates="noop,cost")
    assert list(results(validation)) == list(ALL_GATES) and validation.valid is True
    assert {name for name, passed in results(validation).items() if passed} == {"structure", "noop", "cost"}
    assert {gate.reason for gate in validation.gates if gate.passed is None} == {"not asked for"}


def test_after_a_failed_build_the_gates_that_need_an_image_say_so(with_grader) -> None:
    validation = judge(with_grader, BROKEN["build: a step that fails"].files)
    reasons = {gate.name: gate.reason for gate in validation.gates if gate.passed is None}
    assert reasons.pop("rubric") == "not asked for"
    assert set(reasons.values()) == {"not run: build failed"} and "contamination" not in reasons


def test_the_loop_runs_the_gates_of_its_config_in_their_order(with_grader) -> None:
    gates: tuple[GateName, ...] = ("structure", "noop", "mutation")
    validation = with_grader(lambda grader, _: validate(sort_lines(), grader, config=AdmissionConfig(gates=gates)))
    assert [(gate.name, gate.passed) for gate in validation.gates] == [(name, True) for name in gates]


@pytest.mark.parametrize("gates", [(), ("noop",), ("structure", "noop", "noop")])
def test_a_list_of_gates_without_structure_first_is_refused(gates: tuple[GateName, ...]) -> None:
    with pytest.raises(ValueError, match="structure first"):
        AdmissionConfig(gates=gates)


def test_a_reference_that_earns_nothing_leaves_nothing_to_compare_with(with_grader) -> None:
    validation = judge(with_grader, BROKEN["reference: the wrong output"].files, gates="reference,mutation,determinism")
    assert results(validation)["reference"] is False and results(validation)["mutation"] is None
    assert validation.valid is False and validation.complaint.startswith("reference: ")


# ---- strict


def test_strict_wants_nothing_for_a_no_op(with_grader) -> None:
    third = task(
        "Sort words.txt into sorted.txt, and count its lines into lines.txt.\n",
        "sort words.txt > sorted.txt\ngrep -c '' words.txt > lines.txt\n",
        by_bash("[ -s words.txt ]", "[ $(head -n 1 sorted.txt) = apple ]", "has lines.txt 7"),
        {"words.txt": WORDS},
    )
    assert results(judge(with_grader, third, gates="noop"))["noop"] is True
    assert "earns 0.33" in judge(with_grader, third, gates="noop", strict=True).complaint


def test_strict_wants_what_the_agent_wrote_to_run_without_rights(with_grader) -> None:
    forgeable, safe = SOUND["write_a_script"](), SOUND["program_without_rights"]()
    told = judge(with_grader, forgeable, gates="tampering")
    assert told.valid is True and "the verifier runs longest.sh as a user who may write" in told.gates[8].reason
    assert results(judge(with_grader, forgeable, gates="tampering", strict=True))["tampering"] is False
    assert results(judge(with_grader, safe, gates="tampering", strict=True))["tampering"] is True


def test_strict_wants_the_same_bytes_of_every_build(with_grader) -> None:
    dated = SOUND["archive_made_in_the_build"]()
    assert results(judge(with_grader, dated, gates="reset", strict=True))["reset"] is True  # its members are the same
    dated["environment/Dockerfile"] += b"RUN (date +%s%N; printf '\\0') > built.bin\n"
    told = judge(with_grader, dated, gates="reset")
    assert told.valid is True and "differs in /app/built.bin; the reference earns 1" in told.gates[4].reason
    assert results(judge(with_grader, dated, gates="reset", strict=True))["reset"] is False


# ---- thresholds


def test_the_mutation_score_has_a_threshold(with_grader) -> None:
    half = BROKEN["mutation: one of two outputs"].files
    assert "2 of 4 altered solutions" in judge(with_grader, half, gates="mutation").complaint
    assert judge(with_grader, half, gates="mutation", min_mutation_score=0.5).valid is True


def test_cost_has_thresholds(with_grader) -> None:
    assert "the verifier takes" in judge(with_grader, sort_lines(), gates="cost", max_tests_s=1e-6).complaint
    assert "the build takes" in judge(with_grader, sort_lines(), gates="cost", max_build_s=1e-6).complaint
    assert "MiB to its base" in judge(with_grader, sort_lines(), gates="cost", max_image_mb=1e-6).complaint


# ---- elsewhere


@pytest.mark.skipif(not shim_for_this_machine(), reason="no C compiler: clock and host name are not varied")
def test_a_moved_sandbox_has_another_clock_host_and_locale_and_one_cpu() -> None:
    command = """
        date +%s; python3 -c 'import time; print(int(time.time()))'; printf '%(%s)T\\n'; uname -n
        touch new; echo $(( $(date +%s) - $(stat -c %Y new) )); stat -c %Y old; touch -d @86400 then; stat -c %Y then
        nproc; word=gr\u00fcn; echo ${#word}; python3 -c 'print(hash("a"))'; date +%z; echo $MODE
    """

    async def main() -> list[str]:
        backend = build_backend(SandboxConfig())
        try:
            moved = MovedBackend(backend, everywhere(places(shim_for_this_machine())))
            spec = ImageSpec(env=(("MODE", "fast"), ("LC_ALL", "C.UTF-8")))
            sandbox = await moved.create(await backend.build(spec))
            await sandbox.put("/app", {"old": b""})
            await sandbox.exec("touch -d @1000000000 old")
            return (await sandbox.exec(command)).stdout.decode().split()
        finally:
            await backend.close()

    clocks, rest = (lines := asyncio.run(main()))[:3], lines[3:]
    assert all(400 * 86400 < int(seconds) - time.time() < 410 * 86400 for seconds in clocks)
    assert rest[0] == "orchid" and int(rest[1]) <= 1  # a new file is as new as it is
    assert rest[2:4] == ["1000000000", "86400"]  # times that are set stay what they were set to
    assert rest[4] == "1" and rest[5] == "4"  # one CPU; the image's own LC_ALL is left alone
    assert rest[7:] == ["+1130", "fast"]
    assert rest[6] == asyncio.run(_hash_under("4242"))


async def _hash_under(seed: str) -> str:
    backend = build_backend(SandboxConfig())
    try:
        sandbox = await MovedBackend(backend, Place({"PYTHONHASHSEED": seed})).create(await backend.build(ImageSpec()))
        return (await sandbox.exec("python3 -c 'print(hash(\"a\"))'")).stdout.decode().strip()
    finally:
        await backend.close()


def test_an_image_is_seen_whole_and_the_base_is_not(with_grader) -> None:
    files = task(
        "x\n",
        "true\n",
        by_bash("true"),
        {"a.txt": "a\n"},
        "RUN mkdir -m 750 /opt/t && ln -s /app/a.txt /opt/t/l && head -c 300K /dev/zero > '/opt/t/b b'\n",
    )

    async def look(grader: Grader, backend: Backend) -> StartState:
        return await Eyes(backend).look(await grader.build(task_from_files(files)), "rsi/base")

    state = with_grader(look)
    assert state.files["/app/a.txt"] == b"a\n" and "/opt/t/b b" not in state.files
    assert state.tree["/opt/t"].mode == "750" and state.tree["/opt/t/l"].target == "/app/a.txt"
    assert state.tree["/opt/t/b b"].num_bytes == 300 << 10 and len(state.tree["/opt/t/b b"].sha256) == 64
    assert "/usr/bin/bash" not in state.tree and 0.28 < state.size_mb < 0.3


# ---- pure parts


@pytest.mark.parametrize(
    "line, altered",
    [
        ("head -n 3 a > b", "head -n 4 a > b"),
        ("cmd 2>/dev/null", ""),
        ("echo $1 ${x2}", ""),
        ("sort a > b", "sort -r a > b"),
        ("grep fig a > b", "grep -v fig a > b"),
        ("x = sorted(y)", "x = list(y)"),
        ("[ $a -gt $b ]", "[ $a -lt $b ]"),
        ("echo 'done' > f", "echo 'donex' > f"),
        ("rm a.txt", ""),
        ("chmod 600 k; chmod 644 j", "chmod 600 k; chmod 645 j"),
    ],
)
def test_a_line_is_altered_in_one_place(line: str, altered: str) -> None:
    assert altered_line(line) == altered


def test_mutants_are_lines_dropped_and_altered() -> None:
    files = task("x\n", "# why\ncd /app\nsort a > b\nif true; then\nhead -n 1 b > c\nfi\n", by_bash("true"))
    made = task_from_files(files)
    mutants = mutants_of(made)
    assert [mutant.what for mutant in mutants] == [
        *(f"line {line} of solve.sh dropped" for line in (4, 5, 6, 7)),
        *(f"line {line} of solve.sh altered" for line in (5, 7)),
    ]
    assert b"sort" not in mutants[1].applied(made) and b"head -n 2 b" in mutants[5].applied(made)
    assert [mutant.number for mutant in sample(mutants, 3)] == [4, 6, 5]


def test_scratch_files_and_volatile_ones_make_no_difference() -> None:
    def outputs(**contents: str) -> dict[str, Entry]:
        return {path: Entry("file", 0o644, content.encode()) for path, content in contents.items()}

    start, right = outputs(a="1", b="2"), outputs(a="1", c="3")
    assert not differs(right, {**right, **outputs(scratch="x")}, start, frozenset())
    assert differs(right, {**right, **outputs(b="2")}, start, frozenset())
    assert differs(right, outputs(a="1"), start, frozenset())
    assert not differs(right, outputs(a="1", c="now"), start, frozenset({"c"}))


def test_wrong_outputs_keep_names_and_modes_and_leave_rightly_empty_files_alone() -> None:
    start = {"in.txt": Entry("file", 0o644, b"input\n"), "in.csv": Entry("file", 0o644, b"1,2\n")}
    right = {**start, "out.csv": Entry("file", 0o600, b"3\n"), "READY": Entry("file", 0o644, b"")}
    wrong = dict(wrong_outputs(start, right))
    assert [outputs["out.csv"].content for outputs in wrong.values()] == [b"", b"0\n", b"1,2\n"]
    assert all(outputs["out.csv"].mode == 0o600 and outputs["READY"].content == b"" for outputs in wrong.values())
    assert dict(wrong_outputs(start, {**start, "READY": Entry("file", 0o644, b"")})) == {}


def test_a_repository_does_not_keep_the_right_answer_among_wrong_outputs() -> None:
    start = {".git/HEAD": Entry("file", 0o644, b"a"), "f": Entry("file", 0o644, b"1")}
    right = {
        ".git/HEAD": Entry("file", 0o644, b"b"),
        ".git/new": Entry("file", 0o644, b"c"),
        "f": Entry("file", 0o644, b"2"),
    }
    for outputs in dict(wrong_outputs(start, right)).values():
        assert outputs[".git/HEAD"].content == b"a" and ".git/new" not in outputs


@pytest.mark.parametrize(
    "instruction, certain",
    [
        ("Write the sum to s.txt. It is 1048576.", True),
        ("Write the sum to s.txt. It has 10485761 digits.", False),  # part of a word
        ("Write the sum of a.txt to s.txt.", False),
    ],
)
def test_a_value_that_the_solution_works_out_may_not_be_told(instruction: str, certain: bool) -> None:
    files = task(
        instruction + "\n", "awk '{ s += $1 } END { print s }' a.txt > s.txt\n", by_bash("true"), {"a.txt": "1\n"}
    )
    leaks = in_instruction(task_from_files(files), {"s.txt": b"1048576\n"})
    assert any(leak.certain for leak in leaks) is certain


def test_a_blob_is_found_loose_and_packed() -> None:
    # git hash-object of "hello\n" is ce013625030ba8dba906f756967f9e9ca394464a.
    loose = StartState({"/app/.git/objects/ce/013625030ba8dba906f756967f9e9ca394464a": Seen("f", "444", "0:0")}, {})
    assert in_history(b"hello\n", loose) == ["/app/.git"] and in_history(b"hello", loose) == []
    index = b"\xfftOc" + bytes.fromhex("ce013625030ba8dba906f756967f9e9ca394464a")
    packed = StartState({}, {"/r/.git/objects/pack/pack-1.idx": index})
    assert in_history(b"hello\n", packed) == ["/r/.git"]


def test_only_programs_are_forged() -> None:
    start: Mapping[str, Entry] = {"old.sh": Entry("file", 0o755, b"#!/bin/sh\n")}
    made = {"a.py": Entry("file", 0o644, b"x"), "run": Entry("file", 0o755, b"x"), "t.txt": Entry("file", 0o644, b"x")}
    forged = forged_programs(start, {**start, **made})
    assert forged.keys() == {"a.py", "run"} and b"reward.json" in forged["run"].content


def test_a_canary_is_kept_as_a_hash_and_sets_are_joined() -> None:
    guid = "0c2f6a1e-1111-4222-8333-9d9d9d9d9d9d"
    theirs = task_from_files(SOUND["count_words"]() | {"instruction.md": f"# canary {guid}\nDo it.\n".encode()})
    held_out = HeldOut.joined(
        [HeldOut.from_texts(["some other text that is held out here"]), HeldOut.from_tasks([theirs])]
    )
    ours = task_from_files({**sort_lines(), "environment/notes": f"id = {guid.upper()}\n".encode()})
    assert contaminated(ours, held_out) == "environment/notes carries a benchmark's canary; write another task"
    assert contaminated(ours, None) == ""


@pytest.mark.parametrize(
    "line, complaint",
    [
        ("pip install pytest", "installs"),
        ("cd /app && python3 -m pip install -r r.txt", "installs"),
        ("if ! apt-get update -qq; then exit; fi", "installs"),
        ("uvx -p 3.13 pytest /tests", "installs"),
        ("curl -s https://example.org/x | sh", "fetches"),
        ("# pip install pytest", ""),
        ("echo 'run pip install first'", ""),
        ("curl -s http://localhost:8080/health", ""),
        ("curl -s http://127.0.0.1:8080/health", ""),
        ("grep -q 'apt-get install' /app/Dockerfile", ""),
    ],
)
def test_a_verifier_that_reaches_out_is_told_from_one_that_speaks_of_it(line: str, complaint: str) -> None:
    found = list(reaches_out({"more.sh": f"#!/bin/bash\n{line}\n".encode()}))
    assert (complaint in found[0]) if complaint else found == []
