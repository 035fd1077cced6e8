"""The `rsi` command: quick help, plain errors, and output that other tools read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rsi.cli import main


def test_help_teaches_and_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\nfrom rsi.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print('LOADED', sorted({'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "scripts/quickstart.sh" in shown and "eval" in shown and "sandbox" in shown and "pool" in shown
    assert shown.endswith("LOADED []\n")


def test_the_installed_command_is_this_one() -> None:
    command = Path(sys.executable).with_name("rsi")
    assert command.exists(), "install the checkout first: scripts/test.sh does"
    shown = subprocess.run([str(command), "--help"], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("usage: rsi")


def test_a_command_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--model", str(tmp_path / "nothing")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rsi: ") and str(tmp_path / "nothing") in error
    assert "Traceback" not in error


def test_an_unknown_override_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--model", "m", "sandbox.max_alve=2"]) == 2
    assert "did you mean sandbox.max_alive?" in capsys.readouterr().err


def test_config_prints_the_whole_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.yaml").write_text("steps: 3\n")
    assert main(["config", str(tmp_path / "r.yaml"), "--steps", "4", "engine.max_len=77"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("steps: 4\n") and "  max_len: 77\n" in shown


def test_config_tells_a_mistake_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.yaml").write_text("stepz: 3\n")
    assert main(["config", str(tmp_path / "r.yaml")]) == 2
    assert capsys.readouterr().err == f"rsi: {tmp_path / 'r.yaml'}:stepz: unknown key 'stepz'; did you mean steps?\n"


# ---- sandboxes


def write_answer_task(path: Path) -> Path:
    from rsi.harbor.task import new_task_files, task_from_files, write_task

    files = {
        **new_task_files("answer"),
        "instruction.md": b"Sort in.txt.",
        "environment/files/in.txt": b"b\na\n",
        "solution/solve.sh": b"sort in.txt\n",
    }
    write_task(task_from_files(files), path)
    return path


def test_a_shell_shows_a_task_as_the_solver_sees_it(tmp_path: Path) -> None:
    lines = "pwd; cd /tmp\npwd\nsort /app/in.txt; false\nls /tests /solution\n"
    command = ["sandbox", "shell", str(write_answer_task(tmp_path / "task"))]
    code = "import sys; from rsi.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *command], input=lines, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = "Sort in.txt.\n\n/app\n/tmp\na\nb\n[exit 1]\n"
    assert done.stdout.startswith(expected) and done.stdout.count("No such file") == 2


def test_a_shell_of_what_is_no_task_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sandbox", "shell", str(tmp_path / "nowhere")]) == 2
    assert "is not a directory; name one that holds task.toml" in capsys.readouterr().err


def test_bench_gives_every_figure_and_null_for_a_backend_that_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    assert main(["sandbox", "bench", "--json", "--cycles", "2", "--episodes", "2", "--alive", "2"]) == 0
    figures = json.loads(capsys.readouterr().out)
    by_backend = {"cycle_ms_median", "cycles_per_s", "episodes_per_s", "cpu_s_per_episode"}
    assert set(figures) == by_backend | {"mb_per_sandbox"}
    for name in by_backend:
        assert figures[name]["namespace"] > 0 and figures[name]["docker"] is None


def test_sweep_removes_what_a_dead_host_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    top = tmp_path / f"rsi-sandboxes-{os.geteuid()}"
    (top / "sbx-5000000-0-0" / "mnt").mkdir(parents=True)  # no pid is that large
    (top / "notes").mkdir()
    assert main(["sandbox", "sweep", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"swept": ["sbx-5000000-0-0"]}
    assert [path.name for path in top.iterdir()] == ["notes"]
    assert main(["sandbox", "sweep"]) == 0
    assert capsys.readouterr().out == "nothing was left behind\n"


def test_sandbox_probe_takes_the_keys_of_its_block(capsys: pytest.CaptureFixture[str]):
    assert main(["sandbox", "probe", "--json", "cgroups=false"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["missing"]) == {"memory", "cpu"} and "network" in found["enforced"]
