"""What holds for every test: no network for model hubs, one thread a process (two cores are shared by everything)."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when torch is first imported
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


@pytest.fixture(scope="session")
def repo() -> Path:
    """The checkout."""
    return Path(__file__).resolve().parent.parent
