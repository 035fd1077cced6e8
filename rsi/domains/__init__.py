"""Domains: what seeds a pool, one file a domain. The Protocol and `build_domain`."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from rsi.types import Task


class Domain(Protocol):
    name: str

    def seeds(self, num: int, rng: np.random.Generator) -> list[Task]:
        """`num` distinct tasks written by a program, for the first pool. Their tests are part of them."""
        ...


def build_domain(name: str) -> Domain:
    match name:
        case "terminal":
            from rsi.domains.terminal import TerminalDomain

            return TerminalDomain()
        case _:
            raise ValueError(f"unknown domain {name!r}; the domains are: terminal")
