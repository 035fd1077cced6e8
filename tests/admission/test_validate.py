from collections.abc import Mapping

import pytest

from rsi.admission.contamination import HeldOut
from rsi.admission.evidence import AdmissionConfig
from rsi.admission.validate import GateResult, Validation, snapshot, validate
from rsi.harbor.grade import Grader
from rsi.harbor.task import TaskError, new_task_files
from rsi.sandbox import Backend, Image, ImageSpec, Limits, Network, Sandbox, SandboxError
from rsi.types import Lineage

LIMITS = Limits()
GATES = ["structure", "contamination", "build", "reference", "noop"]
TESTS = b"from verify import check_text\n\n\ndef test_rilo():\n    check_text('rilo.txt', 'a')\n"


def files(**changed: bytes | None) -> dict[str, bytes]:
    """A valid proposal, with some files changed or (None) left out."""
    proposal: dict[str, bytes | None] = {
        **new_task_files("t"),
        "instruction.md": b"Sort kamo.txt into rilo.txt.",
        "environment/files/kamo.txt": b"a\n",
        "solution/solve.sh": b"#!/bin/bash\nset -e\nsort kamo.txt > rilo.txt\n",
        "tests/test_outputs.py": TESTS,
        **changed,
    }
    return {path: content for path, content in proposal.items() if content is not None}


def judge(with_grader, proposal: Mapping[str, bytes], held_out: HeldOut | None = None, **config) -> Validation:
    async def main(grader: Grader, _: Backend) -> Validation:
        return await validate(proposal, grader, held_out, AdmissionConfig(**config), "terminal", Lineage(revision=1))

    return with_grader(main)


def test_a_good_proposal_passes_every_gate(with_grader) -> None:
    validation = judge(with_grader, files())
    assert validation.complaint == "" and validation.valid is True
    assert [(gate.name, gate.passed) for gate in validation.gates] == [(name, True) for name in GATES]
    assert validation.task is not None and validation.task.lineage.revision == 1


NOW = b"#!/bin/bash\nset -e\ndate +%s%N > rilo.txt\n"


@pytest.mark.parametrize(
    "changed, complaint",
    [
        ({"instruction.md": None}, "structure: instruction.md is missing"),
        ({"solution/solve.sh": None}, "structure: solution/solve.sh is missing"),
        (
            {"task.toml": b"[environment]\n"},
            'structure: task.toml has no network_mode = "no-network" under [environment]; add it',
        ),
        (
            {"environment/Dockerfile": b"FROM rsi/base\nEXPOSE 1\n"},
            "structure: environment/Dockerfile line 2: EXPOSE: is not supported",
        ),
        (
            {"environment/files/kamo.txt": None},
            "structure: environment/Dockerfile line 3: COPY: environment/files does not exist",
        ),
        ({"tests/verify.py": b"print(1)"}, "structure: tests/verify.py is not the managed one"),
        (
            {"tests/test.sh": b"#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"},
            "structure: tests/test.sh is not the managed",
        ),
        ({"tests/test_outputs.py": None}, "structure: tests/ has no test_*.py"),
        ({"../x": b""}, "structure: the path '../x' is not relative"),
        (
            {"environment/Dockerfile": b"FROM rsi/base\nWORKDIR /app\nCOPY files/ /app/\nRUN cat nowhere >&2\n"},
            "build: cat: nowhere: No such file or directory",
        ),
        (
            {"solution/solve.sh": b"#!/bin/bash\nset -e\nsort tamo.txt > rilo.txt\n"},
            "reference: sort: cannot read: tamo.txt: No such file or directory",
        ),
        ({"solution/solve.sh": b"#!/bin/bash\necho b > rilo.txt\n"}, "reference: rilo.txt differs"),
        (
            {"solution/solve.sh": b"#!/bin/bash\necho a > rilo.txt; exit 3\n"},
            "reference: solution/solve.sh ended with exit code 3",
        ),
        (
            {"solution/solve.sh": b"#!/bin/bash\nsrot kamo.txt > rilo.txt\n"},
            "reference: line 2: srot: command not found",
        ),
        ({"tests/test_outputs.py": b"def test_a(:\n"}, "reference: "),
        ({"tests/test_outputs.py": b"x = 1\n"}, "reference: the verifier wrote no reward"),
        ({"tests/test_outputs.py": b"def test_a():\n    pass\n"}, "noop: doing nothing earns 1.00; test more"),
        (
            {"tests/test_outputs.py": TESTS + b"\n\ndef test_kamo():\n    check_text('kamo.txt', 'a')\n"},
            "noop: doing nothing earns 0.50; test more of what the solution changes",
        ),
    ],
)
def test_a_broken_proposal_is_told_the_first_gate_it_fails(with_grader, changed: dict, complaint: str) -> None:
    validation = judge(with_grader, files(**changed))
    assert validation.valid is False
    assert validation.complaint.startswith(complaint)
    assert len(validation.complaint) <= 200 and "\n" not in validation.complaint
    assert [gate.passed for gate in validation.gates] == [True] * (len(validation.gates) - 1) + [False]


def test_a_reference_that_earns_by_luck_fails_on_a_second_instance(with_grader) -> None:
    """Each instance writes another time, so the tests that fit the first cannot fit the second."""

    async def main(grader: Grader, _: Backend) -> Validation:
        lucky = files(**{"solution/solve.sh": NOW})
        tests = await snapshot(lucky, grader)
        return await validate({**lucky, **{f"tests/{k}": v for k, v in tests.items()}}, grader)

    assert with_grader(main).complaint == "reference: rilo.txt differs"


class CountingBackend:
    """The real backend, counting sandboxes."""

    def __init__(self, backend: Backend):
        self.num_created = 0
        self._backend = backend
        self.probe, self.build, self.close = backend.probe, backend.build, backend.close

    async def create(self, image: Image, limits: Limits = LIMITS, network: Network = "none") -> Sandbox:
        self.num_created += 1
        return await self._backend.create(image, limits, network)


def test_the_tests_run_anew_on_each_instance_of_the_reference(with_grader) -> None:
    async def main(_: Grader, backend: Backend) -> int:
        counting = CountingBackend(backend)
        assert (await validate(files(), Grader(counting))).valid is True
        return counting.num_created

    # Twice the reference and its tests, though both leave the same files; then the start state, and its tests.
    assert with_grader(main) == 6


def test_held_out_text_is_found_and_not_shown(with_grader) -> None:
    held = HeldOut.from_texts(["Sort kamo.txt into rilo.txt."])
    validation = judge(with_grader, files(), held)
    assert validation.complaint == "contamination: 1 of 1 13-grams are held out; write another task"


def test_our_own_verifier_can_be_waived(with_grader) -> None:
    own = b"#!/bin/bash\n[ -f rilo.txt ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n"
    proposal = files(**{"tests/test.sh": own, "tests/verify.py": None, "tests/test_outputs.py": None})
    assert judge(with_grader, proposal).valid is False
    assert judge(with_grader, proposal, managed_verifier=False).valid is True


class BrokenBackend:
    """A host whose disk is full from the start, or from the first sandbox on."""

    def __init__(self, builds: bool):
        self._builds = builds

    async def probe(self):
        raise SandboxError("the disk is full; free some space")

    async def build(self, spec: ImageSpec, timeout_s: float = 60.0) -> Image:
        if not self._builds:
            raise SandboxError("the disk is full; free some space")
        return Image("i", ())

    async def create(self, image: Image, limits: Limits = LIMITS, network: Network = "none") -> Sandbox:
        raise SandboxError("the disk is full; free some space")

    async def close(self) -> None:
        return None


@pytest.mark.parametrize("builds, gate", [(False, "build"), (True, "reference")])
def test_our_faults_are_neither_passed_nor_failed(builds: bool, gate: str) -> None:
    import asyncio

    validation = asyncio.run(validate(files(), Grader(BrokenBackend(builds))))
    assert validation.valid is None
    assert validation.gates[-1].name == gate and validation.gates[-1].passed is None
    assert validation.complaint == f"{gate}: the disk is full; free some space"


def test_snapshot_writes_tests_that_make_a_proposal_valid(with_grader) -> None:
    async def main(grader: Grader, _: Backend) -> None:
        bare = {path: content for path, content in files().items() if not path.startswith("tests/")}
        tests = await snapshot(bare, grader)
        assert b'check_text("rilo.txt", "a")' in tests["test_outputs.py"].replace(b"'", b'"')
        complete = {**bare, **{f"tests/{path}": content for path, content in tests.items()}}
        assert (await validate(complete, grader)).valid is True

    with_grader(main)


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({"solution/solve.sh": b"#!/bin/bash\ntrue\n"}, "the solution changes nothing"),
        ({"solution/solve.sh": b"#!/bin/bash\nset -e\ncat tamo.txt\n"}, "^cat: tamo.txt: No such file or directory$"),
        ({"instruction.md": None}, "^instruction.md is missing$"),
        ({"environment/Dockerfile": b"FROM rsi/base\nEXPOSE 1\n"}, "EXPOSE: is not supported"),
        ({"environment/Dockerfile": b"FROM rsi/base\nRUN cat nowhere\n"}, "^cat: nowhere: No such file"),
    ],
)
def test_snapshot_says_why_it_wrote_nothing(with_grader, changed: dict, reason: str) -> None:
    async def main(grader: Grader, _: Backend) -> None:
        with pytest.raises(TaskError, match=reason):
            await snapshot(files(**changed), grader)

    with_grader(main)


def test_verdicts_of_gates_add_up() -> None:
    def validation(*passed: bool | None) -> Validation:
        return Validation(None, tuple(GateResult("g", p, "r", 0.0) for p in passed))

    assert [validation(*p).valid for p in [(True,), (True, None), (None, False)]] == [True, None, False]
