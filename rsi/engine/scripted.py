"""An engine for tests: it says what it was told to say, through the real tokenizer and the real Protocol.

A script maps what the policy has seen to what it says next, so that concurrent episodes need no order among them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rsi.engine import Completion, EngineError, Request

Script = Callable[[str], str]
"""The whole context as text, special tokens shown, to the assistant's next text, without its stop id. To break as an
engine does, raise EngineError."""

LOGPROB = -0.5
"""Of every token that is said, nats."""


def replay(texts: list[str]) -> Script:
    """Say `texts` one after the other, whatever is asked; for one episode at a time."""
    left = list(texts)

    def say(context: str) -> str:
        if not left:
            raise EngineError(f"the script ended after {len(texts)} texts; the last context ends in {context[-200:]!r}")
        return left.pop(0)

    return say


class ScriptedEngine:
    """Meets the Engine Protocol. tokenizer: a transformers tokenizer; end_id: the stop id that closes every text."""

    def __init__(self, tokenizer: Any, end_id: int, script: Script):
        self.num_generated = 0
        self.version = 0
        self.requests: list[Request] = []
        """Every request so far, in order."""
        self.ended: list[str] = []
        """Every session that was ended, in order."""
        self._tokenizer, self._end_id, self._script = tokenizer, end_id, script

    async def generate(self, request: Request) -> Completion:
        """The script's text and the stop id, cut at max_new (finish "length")."""
        self.requests.append(request)
        context = self._tokenizer.decode(
            list(request.tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        said = [*self._tokenizer.encode(self._script(context), add_special_tokens=False), self._end_id]
        tokens = tuple(said[: request.max_new])
        self.num_generated += len(tokens)
        finish = "stop" if len(said) <= request.max_new else "length"
        return Completion(tokens, (LOGPROB,) * len(tokens), finish, self.version)

    def end(self, session: str) -> None:
        self.ended.append(session)

    async def load(self, weights: Any, version: int) -> None:
        """Takes the version alone: a script has no weights."""
        self.version = version

    async def close(self) -> None:
        """Nothing to give back."""
