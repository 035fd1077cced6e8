"""Content hashes: by them a base, a layer and an image are found again."""

from __future__ import annotations

import hashlib
import json

from rsi.sandbox import Step


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def step_key(step: Step) -> str:
    copied = {path: hashlib.sha256(content).hexdigest() for path, content in (step.copy or {}).items()}
    return json.dumps([step.run, step.user, sorted(copied.items()), step.copy is not None])
