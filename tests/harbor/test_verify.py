"""verify.py is run as it is run in a task: by its own interpreter, isolated, beside the test files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rsi.harbor import verify
from rsi.harbor.task import verifier_files

PLAIN = {
    "all pass": "def test_a():\n    assert True\n\ndef test_b():\n    pass\n",
    "half": "def test_a():\n    assert 1 == 1\n\ndef test_b():\n    assert 0, 'kamo.txt differs\\nmore'\n",
    "errors": "import os\ndef test_a():\n    open('nowhere.txt')\n\ndef test_exit():\n    raise SystemExit(0)\n",
    "helpers and order": (
        "from verify import check_text\nLIST = []\ndef helper():\n    return 1\n\n"
        "def test_b():\n    LIST.append(helper())\n\ndef test_a():\n    assert LIST == [1]\n"
    ),
    "import fails": "open('nowhere.txt')\ndef test_a():\n    pass\n",
    "a bare assertion": "def test_a():\n    assert 0\n",
    "checks": "from verify import check_text\ndef test_a():\n    check_text('rilo.txt', 'x')\n",
    "class without tests": "class Box:\n    def test_a(self):\n        assert 0\n\ndef test_b():\n    pass\n",
    "no tests": "x = 1\n",
}
NOT_PLAIN = {
    "parameters": "import pytest\n@pytest.mark.parametrize('x', [1, 2, 3])\ndef test_a(x):\n    assert x < 3\n",
    "fixture": "def test_a(tmp_path):\n    assert tmp_path\n",
    "class": "class TestA:\n    def test_b(self):\n        pass\n    def test_c(self):\n        assert 0, 'no'\n",
    "unittest": "import unittest\nclass A(unittest.TestCase):\n    def test_b(self):\n        self.assertEqual(1, 2)\n",
    "set-up": "X = []\ndef setup_module():\n    X.append(1)\ndef test_a():\n    assert X\n",
    "skipped and xfail": (
        "import pytest\ndef test_a():\n    pass\n@pytest.mark.skip\ndef test_b():\n    pass\n"
        "@pytest.mark.xfail\ndef test_c():\n    assert 0\n@pytest.mark.xfail\ndef test_d():\n    pass\n"
    ),
    "defined twice": "def test_a():\n    assert 0\ndef test_b():\n    pass\ndef test_a():\n    pass\n",
    "bound otherwise": "test_a = lambda: None\nif True:\n    def test_b():\n        assert 0\n",
    "syntax": "def test_a(:\n    pass\n",
    "failing teardown": (
        "import pytest\n@pytest.fixture\ndef x():\n    yield 1\n    raise ValueError('torn')\ndef test_a(x): pass\n"
    ),
    "failing set-up": "import pytest\n@pytest.fixture\ndef x():\n    raise ValueError('no')\ndef test_a(x): pass\n",
}


def run(tmp_path: Path, tests: dict[str, str], cwd_files: dict[str, str] | None = None):
    """(reward text or None, [(name, status, message)], exit code) of one run of the verifier."""
    for name, content in {**tests, **{k: v.decode() for k, v in verifier_files().items()}}.items():
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).write_text(content)
    (tmp_path / "app").mkdir(exist_ok=True)
    for name, content in (cwd_files or {}).items():
        (tmp_path / "app" / name).write_text(content)
    argv = [
        sys.executable,
        "-I",
        "-B",
        str(tmp_path / "tests/verify.py"),
        str(tmp_path / "tests"),
        str(tmp_path / "logs"),
    ]
    done = subprocess.run(argv, cwd=tmp_path / "app", capture_output=True, text=True, timeout=60)
    reward, ctrf = tmp_path / "logs/reward.txt", tmp_path / "logs/ctrf.json"
    listed = json.loads(ctrf.read_text())["results"]["tests"] if ctrf.exists() else []
    results = [(test["name"], test["status"], test["message"]) for test in listed]
    return (reward.read_text().strip() if reward.exists() else None), results, done


@pytest.mark.parametrize("name", PLAIN)
def test_plain_files_get_the_same_results_from_pytest_and_without_it(tmp_path: Path, name: str) -> None:
    assert verify.is_plain(PLAIN[name])
    quick = run(tmp_path / "quick", {"test_outputs.py": PLAIN[name]}, {"rilo.txt": "x\n"})
    # An empty conftest.py leaves the tests as they are and takes the way through pytest.
    real = run(tmp_path / "real", {"test_outputs.py": PLAIN[name], "conftest.py": ""}, {"rilo.txt": "x\n"})
    assert "pytest" not in quick[2].stdout and "pytest" not in quick[2].stderr
    assert quick[:2] == real[:2]


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_other_files_are_left_to_pytest(name: str) -> None:
    assert not verify.is_plain(NOT_PLAIN[name])


@pytest.mark.parametrize(
    "name, reward, statuses",
    [
        ("parameters", 2 / 3, ["passed", "passed", "failed"]),
        ("class", 0.5, ["passed", "failed"]),
        ("unittest", 0.0, ["failed"]),
        ("skipped and xfail", 0.25, ["passed", "skipped", "other", "other"]),
        ("syntax", 0.0, ["failed"]),
        ("failing teardown", 0.0, ["failed"]),
        ("failing set-up", 0.0, ["failed"]),
    ],
)
def test_pytest_results_are_counted_and_only_passes_earn(
    tmp_path: Path, name: str, reward: float, statuses: list[str]
) -> None:
    text, results, _ = run(tmp_path, {"test_outputs.py": NOT_PLAIN[name]})
    assert [status for _, status, _ in results] == statuses
    assert text is not None and float(text) == reward


def test_half_of_the_tests_earn_half_and_the_message_is_one_line(tmp_path: Path) -> None:
    text, results, _ = run(tmp_path, {"test_outputs.py": PLAIN["half"]})
    assert text == "0.5"
    assert results == [
        ("test_outputs.py::test_a", "passed", ""),
        ("test_outputs.py::test_b", "failed", "kamo.txt differs"),
    ]


def test_without_tests_there_is_no_reward(tmp_path: Path) -> None:
    text, results, done = run(tmp_path, {"test_outputs.py": "x = 1\n"})
    assert text is None and results == []
    assert "no tests were found" in done.stdout


def test_a_run_that_dies_leaves_no_reward(tmp_path: Path) -> None:
    text, _, done = run(
        tmp_path, {"test_outputs.py": "import os\ndef test_a():\n    pass\ndef test_b():\n    os._exit(0)\n"}
    )
    assert done.returncode == 0 and text is None


def test_what_lies_in_the_workdir_does_not_reach_the_verifier(tmp_path: Path) -> None:
    planted = {
        "conftest.py": "raise SystemExit\n",
        "pytest.py": "raise SystemExit\n",
        "json.py": "raise SystemExit\n",
        "pytest.ini": "[pytest]\naddopts = --collect-only\n",
        "test_more.py": "def test_free():\n    pass\n",
    }
    text, results, _ = run(tmp_path, {"test_outputs.py": NOT_PLAIN["class"]}, planted)
    assert text == "0.5" and len(results) == 2


def test_a_second_test_file_is_counted(tmp_path: Path) -> None:
    text, results, _ = run(
        tmp_path, {"test_outputs.py": PLAIN["half"], "sub/test_more.py": "def test_c():\n    pass\n"}
    )
    assert text is not None and float(text) == 2 / 3 and len(results) == 3


def test_a_test_that_closes_the_output_or_leaves_the_workdir_still_counts(tmp_path: Path) -> None:
    source = (
        "import os, sys\ndef test_a():\n    os.chdir('/')\n    sys.stdout.close()\n"
        "def test_b():\n    assert 0, '\\udcff'\n"
    )
    text, results, _ = run(tmp_path, {"test_outputs.py": source})
    assert text == "0.5" and [status for _, status, _ in results] == ["passed", "failed"]
