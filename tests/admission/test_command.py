"""`rsi validate` as people and programs call it, and what damaged directories do to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rsi.admission.command import exit_status
from rsi.admission.validate import ALL_GATES, GateResult, Validation
from rsi.cli import main
from tests.corpus.broken import BROKEN, HELD_OUT, HELD_SOLUTION
from tests.corpus.sound import SOUND, sort_lines
from tests.corpus.write import Files

QUICK = ["--gates", "build,reference,noop"]


def write(folder: Path, files: Files) -> Path:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def test_programs_get_a_line_a_task_and_people_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(tmp_path / "good", SOUND["count_words"]())
    bad = write(tmp_path / "bad", BROKEN["noop: tests of nothing"].files)
    assert main(["validate", str(good), str(bad), "--json", "--jobs", "2", *QUICK]) == 1
    first, second = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (first["task"], first["valid"]) == (str(good), True) and (second["task"], second["valid"]) == (
        str(bad),
        False,
    )
    assert [gate["name"] for gate in first["gates"]] == list(ALL_GATES)
    assert all(gate.keys() == {"name", "passed", "reason", "seconds"} for gate in first["gates"])
    assert [gate["name"] for gate in second["gates"] if gate["passed"] is False] == ["noop"]
    assert main(["validate", str(bad), *QUICK]) == 1
    shown = capsys.readouterr().out
    assert "bad: unsound" in shown and "doing nothing earns 1.00" in shown and "plausible_wrong" in shown
    assert main(["validate", str(good), str(good), *QUICK]) == 0
    assert capsys.readouterr().out.count("good: sound") == 2


def test_keys_and_options_reach_the_gates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = write(tmp_path / "task", sort_lines())
    assert main(["validate", str(task), "admission.max_tests_s=0.000001", "--gates", "cost"]) == 1
    assert "the verifier takes" in " ".join(capsys.readouterr().out.split())
    HELD_OUT.save(tmp_path / "held.npy")
    (task / "solution" / "solve.sh").write_text(HELD_SOLUTION)
    assert (
        main(["validate", str(task), "--gates", "contamination", "--held-out", str(tmp_path / "held.npy"), "--json"])
        == 1
    )
    assert "13-grams are held out" in capsys.readouterr().out


def test_mistakes_are_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (
        (["--gates", "noob"], "no gate is called noob; the gates are structure, build"),
        (["admission.mutant=3"], "did you mean admission.mutants?"),
        (["sandbox.max_alive=2"], "name at least one directory"),
    ):
        given = [] if "sandbox.max_alive=2" in words else [str(tmp_path)]
        assert main(["validate", *given, *words]) == 2
        assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "verdicts, status", [([True, True], 0), ([True, None], 2), ([None, False], 1), ([False], 1), ([], 0)]
)
def test_the_exit_status_says_the_worst(verdicts: list[bool | None], status: int) -> None:
    assert exit_status([Validation(None, (GateResult("g", verdict, "r", 0.0),)) for verdict in verdicts]) == status


def test_a_fault_of_ours_is_no_fault_of_the_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = write(tmp_path / "task", sort_lines())
    (tmp_path / "file").touch()
    broken = f"sandbox.cache_dir={tmp_path}/file"
    assert main(["validate", str(task), broken, "--json", *QUICK]) == 2
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["valid"] is False and not [gate for gate in verdict["gates"] if gate["passed"] is False]
    assert any("free some space" in gate["reason"] for gate in verdict["gates"])


@pytest.mark.parametrize(
    "what", ["nothing", "a file", "an empty folder", "a pipe", "an unreadable depth", "a link out"]
)
def test_what_is_no_task_gets_a_verdict(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "task"
    match what:
        case "a file":
            path.write_text("task")
        case "an empty folder":
            path.mkdir()
        case "a pipe":
            os.mkfifo(path)
        case "an unreadable depth":
            write(path, sort_lines())
            here = os.open(path / "environment", os.O_RDONLY)
            for _ in range(1200):
                os.mkdir("d", dir_fd=here)
                below = os.open("d", os.O_RDONLY, dir_fd=here)
                os.close(here)
                here = below
            os.close(here)
        case "a link out":
            write(path, sort_lines())
            (tmp_path / "secret").write_text("the secret")
            (path / "solution" / "more").symlink_to(tmp_path / "secret")
    try:
        assert main(["validate", str(path), "--json"]) == 1
    finally:
        subprocess.run(["rm", "-rf", str(path)], check=True)
    verdict = json.loads(capsys.readouterr().out)
    assert [gate["name"] for gate in verdict["gates"] if gate["passed"] is False] == ["structure"]
    assert verdict["gates"][0]["reason"] and "the secret" not in json.dumps(verdict)


def test_damaged_directories_get_a_verdict_and_nothing_gets_out(repo: Path) -> None:
    """Every damage once as the first of a case, some of them with another; scripts/fuzz_validate.py does a thousand."""
    command = [sys.executable, str(repo / "scripts" / "fuzz_validate.py"), "--cases", "46", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    summary = json.loads(done.stdout)
    assert done.returncode == 0 and summary["faults"] == [], summary
    assert sum(summary["verdicts"].values()) == 46
    assert summary["verdicts"]["unsound"] >= 30 and summary["verdicts"].get("unjudged", 0) <= 2, summary
