"""Tests that need a tool of the machine: missing, they fail where RSI_REQUIRE names it, and skip elsewhere."""

from __future__ import annotations

import os
import socket
from typing import Literal

import pytest


def require(tool: Literal["docker"]) -> None:
    """Return if `tool` can be used. docker: an engine answers at $DOCKER_HOST, a unix socket."""
    reason = _missing_docker()
    if not reason:
        return
    message = f"{tool} is missing: {reason}; " + 'as root: eval "$(scripts/docker_engine.sh start)"'
    if tool in os.environ.get("RSI_REQUIRE", "").split():
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


def _missing_docker() -> str:
    path = os.environ.get("DOCKER_HOST", "").removeprefix("unix://")
    if not path:
        return "DOCKER_HOST is not set"
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(path)
    except OSError as error:
        return f"nothing answers at {path}: {error.strerror}"
    return ""
