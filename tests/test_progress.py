"""rsi.progress: lines without a terminal, a live display on one, and the table at the end."""

from __future__ import annotations

import io

from rich.console import Console

from rsi.progress import Progress, duration, print_heldout, print_summary

SUITE = {
    "suite": "heldout",
    "n": 100,
    "pass_rate": {"1": 0.9, "3": 0.1},
    "ci95": {"1": [0.786, 0.957], "3": [0.043, 0.214]},
}


def plain() -> Console:
    return Console(file=io.StringIO(), width=100)


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_each_step_is_one_line_without_escapes() -> None:
    console = plain()
    progress = Progress(40, console)
    progress.start(0)
    progress.role, progress.done, progress.alive = "solver", 64, 0
    progress.solver_pass_rate, progress.valid_rate, progress.admitted = 0.414, 0.8, 3
    progress.end_step(1)
    progress.end_step(2)
    progress.stop()
    first, second = text(console).splitlines()
    assert first.startswith("step 1/40  episodes 64 done, 0 alive  solver 41%  valid 80%  admitted 3  tokens/s ")
    assert second.startswith("step 2/40  episodes 0 done, 0 alive")
    assert "\x1b" not in first


def test_a_terminal_shows_what_is_going_on_now() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    progress = Progress(4, console)
    progress.start(1)
    progress.role, progress.alive = "proposer", 5
    progress.stop()
    shown = text(console)
    assert "1/4" in shown and "proposer" in shown and "0 done, 5 alive" in shown


def test_time_left_is_unknown_before_a_step_and_zero_after_the_last() -> None:
    progress = Progress(8, plain())
    progress.start(7)
    assert progress.left_s is None
    progress.end_step(8)
    assert progress.left_s == 0.0


def test_the_summary_shows_depths_counts_phases_and_place() -> None:
    console = plain()
    after = {**SUITE, "pass_rate": {"1": 0.96, "3": 0.3}, "ci95": {"1": [0.865, 0.989], "3": [0.191, 0.438]}}
    summary = {
        "heldout_before": SUITE,
        "heldout_after": after,
        "proposed": 40,
        "valid": 30,
        "admitted": 12,
        "wall_s": 605.0,
        "seconds_by_phase": {"proposing": 65.0, "solving": 540.0},
        "run_dir": "runs/tiny_cpu",
    }
    print_summary(summary, console)
    lines = [" ".join(line.split()) for line in text(console).splitlines()]
    assert "│ 3 │ 10.0% [4.3%, 21.4%] │ 30.0% [19.1%, 43.8%] │" in lines
    assert "environments: 40 proposed, 30 valid (75%), 12 admitted" in lines
    assert "wall time: 10 min 05 s (proposing 1 min 05 s, solving 9 min 00 s)" in lines
    assert "run: runs/tiny_cpu" in lines


def test_a_summary_without_evaluation_or_proposals_leaves_them_out() -> None:
    console = plain()
    print_summary({"proposed": 0, "valid": 0, "admitted": 0, "wall_s": 8.25, "heldout_before": None}, console)
    assert text(console).splitlines() == ["environments: 0 proposed, 0 valid, 0 admitted", "wall time: 8.2 s"]


def test_one_measurement_is_one_column() -> None:
    console = plain()
    print_heldout(SUITE, console)
    assert "heldout, n = 100" in text(console) and "90.0%  [78.6%, 95.7%]" in text(console)


def test_durations_are_read_at_a_glance() -> None:
    assert [duration(s) for s in (8.25, 59.9, 245, 7440)] == ["8.2 s", "59.9 s", "4 min 05 s", "2 h 04 min"]
