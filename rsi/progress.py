"""What a person sees of a run: a live display on a terminal, one line a step that stays, a table at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table


class Progress:
    """The loop sets the attributes, the display reads them four times a second. Off a terminal there are only lines."""

    def __init__(self, num_steps: int, console: Console | None = None):
        self.num_steps = num_steps
        self.step = 0
        """Steps done."""
        self.role = "starting"
        """What is going on: proposer, solver, training, held-out ..."""
        self.done = 0
        """Episodes finished in this step."""
        self.alive = 0
        """Episodes going on now."""
        self.solver_pass_rate: float | None = None
        self.valid_rate: float | None = None
        """Valid environments / proposals, faults left out."""
        self.admitted = 0
        """Environments admitted since the start of the run."""
        self.num_tokens = 0
        """Tokens sampled since this process started: `engine.num_generated`."""
        self._console = console or Console()
        self._begin(0)
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4, transient=True)

    def start(self, step: int) -> None:
        """The loop begins (again) with `step` steps done."""
        self._begin(step)
        if self._console.is_terminal:
            self._live.start()

    def stop(self) -> None:
        self._live.stop()

    def end_step(self, step: int) -> None:
        """`step` steps are done: print a line that stays, and count the next step's episodes from 0."""
        self.step = step
        self._console.print(self._line(), highlight=False, soft_wrap=True)
        self.done, self._step_start, self._step_tokens = 0, time.monotonic(), self.num_tokens

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _begin(self, step: int) -> None:
        self.step = self._first_step = step
        self._start = self._step_start = time.monotonic()
        self._step_tokens = self.num_tokens

    @property
    def tokens_per_s(self) -> float:
        """Over the step so far."""
        return (self.num_tokens - self._step_tokens) / max(time.monotonic() - self._step_start, 1e-9)

    @property
    def left_s(self) -> float | None:
        """From the mean of the steps that this process did; None before the first."""
        steps_done = self.step - self._first_step
        if steps_done == 0:
            return None
        return (time.monotonic() - self._start) / steps_done * (self.num_steps - self.step)

    def _facts(self) -> list[tuple[str, str]]:
        return [
            ("step", f"{self.step}/{self.num_steps}"),
            ("role", self.role),
            ("episodes", f"{self.done} done, {self.alive} alive"),
            ("solver", _percent(self.solver_pass_rate)),
            ("valid", _percent(self.valid_rate)),
            ("admitted", str(self.admitted)),
            ("tokens/s", f"{self.tokens_per_s:,.0f}"),
            ("left", "?" if self.left_s is None else duration(self.left_s)),
        ]

    def _line(self) -> str:
        took = duration(time.monotonic() - self._step_start)
        return "  ".join(f"{name} {value}" for name, value in self._facts() if name != "role") + f"  took {took}"

    def _render(self) -> Table:
        table = Table.grid(padding=(0, 2))
        names, values = zip(*self._facts(), strict=True)
        table.add_row(*(f"[dim]{name}[/dim]" for name in names))
        table.add_row(*values)
        return table


def print_summary(summary: Mapping[str, Any], console: Console | None = None) -> None:
    """The table that a run ends with, from what `summary.json` holds; print it when the live display is gone.

    heldout_before, heldout_after: {"n", "pass_rate": {depth: rate}, "ci95": {depth: [low, high]}} or None; proposed,
    valid, admitted: counts; wall_s; seconds_by_phase: {phase: seconds}; run_dir. Missing keys are left out.
    """
    console = console or Console()
    before, after = summary.get("heldout_before"), summary.get("heldout_after")
    if before or after:
        console.print(_heldout_table({"before": before, "after": after}))
    if "proposed" in summary:
        proposed, valid = summary["proposed"], summary.get("valid", 0)
        rate = f" ({valid / proposed:.0%})" if proposed else ""
        counts = f"{proposed} proposed, {valid} valid{rate}, {summary.get('admitted', 0)} admitted"
        console.print(f"environments: {counts}", highlight=False)
    phases = summary.get("seconds_by_phase") or {}
    if "wall_s" in summary:
        parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in phases.items())
        console.print(f"wall time: {duration(summary['wall_s'])}{f' ({parts})' if parts else ''}", highlight=False)
    if "run_dir" in summary:
        console.print(f"run: {summary['run_dir']}", soft_wrap=True, highlight=False)


def print_heldout(result: Mapping[str, Any], console: Console | None = None) -> None:
    """One measurement of a suite."""
    (console or Console()).print(_heldout_table({f"{result['suite']}, n = {result['n']}": result}))


def _heldout_table(measured: Mapping[str, Mapping[str, Any] | None]) -> Table:
    """A row a depth, a column a measurement."""
    table = Table("depth", *measured, title="held-out pass rate, Wilson 95 % interval")
    for depth in sorted({depth for suite in measured.values() if suite for depth in suite["pass_rate"]}):
        table.add_row(depth, *(_rate_cell(suite, depth) for suite in measured.values()))
    return table


def _rate_cell(suite: Mapping[str, Any] | None, depth: str) -> str:
    if not suite or suite["pass_rate"].get(depth) is None:
        return "-"
    low, high = suite["ci95"][depth]
    return f"{suite['pass_rate'][depth]:6.1%}  [{low:.1%}, {high:.1%}]"


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.0%}"


def duration(seconds: float) -> str:
    """`8.3 s`, `4 min 05 s`, `2 h 04 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
