"""The shipped held-out suite: its size, its digest, and that nothing of it can be trained on."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from rsi.admission.contamination import HeldOut
from rsi.domains import build_domain
from rsi.domains.terminal import split_of
from rsi_eval.heldout import SUITE, load_suite
from rsi_eval.make_heldout import suite_text

NAME = re.compile(r"\b([bdfgklmnprst][aou][bdfgklmnprst][ei])\.(?:txt|csv|json|tar)\b")


def test_the_suite_has_fifty_tasks_at_each_depth_and_is_made_from_its_seed():
    assert Counter(item.depth for item in load_suite()) == {1: 50, 2: 50, 3: 50, 4: 50}
    assert suite_text() == SUITE.read_text()


def test_no_seed_uses_a_name_of_the_suite():
    held = {name for item in load_suite() for name in NAME.findall(item.task.instruction)}
    seeds = build_domain("terminal").seeds(200, np.random.default_rng(0))
    assert {split_of(name) for name in held} == {"heldout"}
    assert not held & {name for task in seeds for name in NAME.findall(task.instruction)}


def test_the_contamination_gate_knows_every_deep_task_of_the_suite_and_no_seed():
    suite = load_suite()
    held_out = HeldOut.from_tasks(item.task for item in suite)
    assert all(held_out.overlap(item.task.instruction) for item in suite if item.depth >= 3)
    seeds = build_domain("terminal").seeds(100, np.random.default_rng(1))
    assert not any(held_out.overlap(task.instruction) for task in seeds)


def test_a_changed_suite_is_refused(tmp_path: Path):
    copy = tmp_path / "heldout.jsonl"
    copy.write_text(SUITE.read_text().replace("Sort", "sort", 1))
    copy.with_suffix(".sha256").write_text(SUITE.with_suffix(".sha256").read_text())
    with pytest.raises(ValueError, match="digest .* restore"):
        load_suite(copy)
