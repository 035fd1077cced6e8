"""Tests that need a tool of the machine: missing, they fail where RSI_REQUIRE names it, and skip elsewhere."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Literal

import pytest

HARBOR_PYTHON = Path(__file__).resolve().parents[2] / ".venv-harbor/bin/python"


def require(tool: Literal["docker", "harbor"]) -> None:
    """Return if `tool` can be used. docker: an engine answers at $DOCKER_HOST, a unix socket. harbor: .venv-harbor."""
    reason = _missing_docker() if tool == "docker" else _missing_harbor()
    if not reason:
        return
    message = f"{tool} is missing: {reason}"
    if tool in os.environ.get("RSI_REQUIRE", "").split():
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


def _missing_docker() -> str:
    mend = 'as root: eval "$(scripts/docker_engine.sh start)"'
    path = os.environ.get("DOCKER_HOST", "").removeprefix("unix://")
    if not path:
        return f"DOCKER_HOST is not set; {mend}"
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(path)
    except OSError as error:
        return f"nothing answers at {path}: {error.strerror}; {mend}"
    return ""


def _missing_harbor() -> str:
    if (HARBOR_PYTHON.parent.parent / ".stamp").is_file():  # written last
        return ""
    return "there is no .venv-harbor; make it: scripts/harbor_venv.sh"
