"""Writes the held-out suite: 50 chains at each depth 1 to 4, of words that no seed uses. The same bytes every time.

    python -m rsi_eval.make_heldout

The verifier's own files are the project's and are added when the suite is read, so that the suite holds data alone.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np

from rsi.domains.terminal import draw_tasks
from rsi.harbor.task import verifier_files
from rsi_eval.heldout import SUITE

NUM_PER_DEPTH = 50
DEPTHS = (1, 2, 3, 4)
SEED = 20261014


def suite_text() -> str:
    rng = np.random.default_rng(SEED)
    managed = {f"tests/{path}" for path in verifier_files()}
    lines = []
    for depth in DEPTHS:
        for task in draw_tasks(NUM_PER_DEPTH, depth, "heldout", rng):
            files = {path: content.decode() for path, content in task.files.items() if path not in managed}
            lines.append(json.dumps({"depth": depth, "domain": task.domain, "files": files}))
    return "\n".join(lines) + "\n"


def main() -> None:
    text = suite_text()
    SUITE.write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    SUITE.with_suffix(".sha256").write_text(f"{digest}  {SUITE.name}\n")
    print(f"wrote {SUITE.name}, sha256 {digest}")


if __name__ == "__main__":
    main()
