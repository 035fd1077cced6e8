from pathlib import Path

import numpy as np
import pytest

from rsi.admission.contamination import HeldOut
from rsi.types import Task

HELD = "Sort the lines of kamo.txt by their second column, write them to rilo.txt and remove kamo.txt."


def test_thirteen_shared_words_are_found_whatever_their_case_and_punctuation() -> None:
    held = HeldOut.from_texts([HELD])
    shared = "First do this: SORT the lines; of kamo txt by their second column write them now"
    # 13 words: sort the lines of kamo txt by their second column write them | now; only 12 are shared.
    assert held.overlap(shared) is None
    assert held.overlap(shared.replace("now", "to rilo")) == "2 of 5 13-grams are held out"


def test_a_text_without_shared_grams_passes() -> None:
    assert (
        HeldOut.from_texts([HELD]).overlap("Count the words of every file in the folder tamo and write the sums.")
        is None
    )
    assert HeldOut.from_texts([]).overlap(HELD) is None


def test_a_short_text_is_found_when_it_is_repeated_whole() -> None:
    held = HeldOut.from_texts(["Count the lines of kamo.txt.", "set -e"])
    assert held.overlap("count the lines of kamo txt") == "1 of 1 13-grams are held out"
    assert held.overlap("count the lines of bina txt") is None
    assert held.overlap("set -e") is None


def test_complaints_do_not_reveal_the_text() -> None:
    complaint = HeldOut.from_texts([HELD]).overlap(HELD)
    assert complaint is not None and not set(complaint.split()) & {"kamo", "rilo", "column"}


def test_instructions_and_solutions_of_tasks_are_held_out() -> None:
    solution = b"#!/bin/bash\nset -e\nsort -k2 kamo.txt | head -n 3 | tr a-z A-Z > rilo.txt\n"
    task = Task(
        "sha256:0", "", HELD, {"solution/solve.sh": solution, "tests/test_outputs.py": b"only in the tests " * 9}
    )
    held = HeldOut.from_tasks([task])
    assert held.overlap(HELD) and held.overlap(solution.decode())
    assert held.overlap("only in the tests " * 9) is None


def test_saved_hashes_load_and_hold_no_text(tmp_path: Path) -> None:
    held = HeldOut.from_texts([HELD])
    held.save(tmp_path / "held.npy")
    assert b"kamo" not in (tmp_path / "held.npy").read_bytes()
    loaded = HeldOut.load(tmp_path / "held.npy")
    assert len(loaded) == len(held) == 7 and loaded.overlap(HELD) == "7 of 7 13-grams are held out"


def test_a_file_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    np.save(tmp_path / "floats.npy", np.zeros(3))
    for name in ("text", "floats.npy"):
        with pytest.raises(ValueError, match="write it with HeldOut.save"):
            HeldOut.load(tmp_path / name)
