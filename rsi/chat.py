"""Messages to token ids and back, for Qwen's chat layout; the one place where each role's prompt is written.

An episode owns one growing list of ids: what was sampled is appended as it was sampled, and only the new message is
encoded. Nothing is ever rendered twice (templates strip thinking, trim whitespace and re-serialise arguments, so a
second rendering is not a prefix of the first). Contents are encoded apart from the frame around them and with special
tokens switched off, so that a file which spells `<|im_end|>` cannot end a turn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rsi.types import Assignment, Role

SYSTEM: dict[Role, str] = {
    "solver": "[solver] Do the task with bash, one command a turn. When all of it is done, answer without a call.",
    "proposer": (
        "[proposer] Build one new task in output/task with bash, one command a turn: read assignment/ and skills/, "
        "write, run tools/snapshot-tests and tools/validate, mend. When it is valid, answer without a call."
    ),
}
"""Each begins with the role's tag and says what that role may do."""

ONE_SHOT = (
    "[proposer] Write one new task in a single answer, without tools: each file after a line `=== path`, "
    "at least instruction.md, solution/solve.sh and the files under environment/files/."
)
"""The proposer's system message in the prompt-only arm."""

BASH_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a bash command; working directory, variables and functions persist.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}

MAX_CALL_CHARS = 64_000
MAX_HINT_CHARS = 4_000


def proposer_message(assignment: Assignment) -> str:
    """What the proposer is asked, in one line; the details lie in its workspace under assignment/."""
    if assignment.parent is None:
        return f"Direction: {assignment.direction}. Domain: {assignment.domain}."
    failure = assignment.failure or "none"
    return (
        f"Direction: {assignment.direction}. Parent: assignment/parent. "
        f"Pass rate: {assignment.pass_rate or 0.0:.2f}. Failure: {failure}."
    )


def invalid_message(complaint: str) -> str:
    """What the proposer reads when a submission fails a gate; complaint is `<gate>: <reason>`."""
    return f"{complaint}. Revise."


def duplicate_message(similarity: float = 1.0) -> str:
    """What the proposer reads when the pool has the task, or one whose instruction and solution are that similar."""
    if similarity >= 1.0:
        return "The pool has this task already. Revise."
    return f"The pool has a task that is {similarity:.0%} the same. Revise."


def revision_message(decision: str, mean: float, hinted: float | None = None) -> str:
    """What the proposer reads when a valid task is out of the band; decision is `too_easy`, `too_hard`, `no_spread`.

    hinted: what the solver earned when it was shown the reference; None: it was not.
    """
    shown = "" if hinted is None else f" Shown the reference, the solver earned {hinted:.2f}."
    return f"Calibration: mean {mean:.2f}, {decision.replace('_', ' ')}.{shown} Revise."


def hinted_instruction(instruction: str, solution: str) -> str:
    """What the solver reads in the diagnostic attempt at a task that was too hard for it."""
    return f"{instruction.rstrip()}\n\nThis script does it:\n{solution[:MAX_HINT_CHARS].rstrip()}\n"


@dataclass(frozen=True)
class Call:
    """The policy asks for a command."""

    command: str


@dataclass(frozen=True)
class Final:
    """The policy answered without a call: it is done."""

    text: str


@dataclass(frozen=True)
class Malformed:
    """A call that could not be read; `complaint` is shown to the policy, and the turn is spent."""

    complaint: str


def call_text(command: str) -> str:
    """The assistant's text that calls bash with `command`, in Qwen's layout."""
    arguments = json.dumps({"name": "bash", "arguments": {"command": command}}, ensure_ascii=False)
    return f"<tool_call>\n{arguments}\n</tool_call>"


def parse_call(text: str) -> Call | Final | Malformed:
    """Read one assistant text. Only the first call counts; the JSON is size-capped before it is parsed."""
    start = text.find("<tool_call>")
    if start < 0:
        return Final(text.strip())
    end = text.find("</tool_call>", start)
    if end < 0:
        return Malformed("the call has no </tool_call>")
    body = text[start + len("<tool_call>") : end]
    if len(body) > MAX_CALL_CHARS:
        return Malformed(f"the call is longer than {MAX_CALL_CHARS} characters")
    try:
        call = json.loads(body)
        command = call["arguments"]["command"]
        name = call["name"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return Malformed('a call is {"name": "bash", "arguments": {"command": "..."}}')
    if name != "bash" or not isinstance(command, str) or not command.strip() or "\0" in command:
        return Malformed("the only tool is bash, and its command is a non-empty string without NUL")
    return Call(command)


class Chat:
    """The chat layout of one tokenizer (a transformers fast tokenizer with a chat template)."""

    def __init__(self, tokenizer: Any, thinking: bool = False):
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "the tokenizer has no chat template; use a chat model, or put chat_template.jinja beside its "
                "tokenizer.json"
            )
        self._tokenizer = tokenizer
        self._thinking = thinking
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        if end is None or end == tokenizer.unk_token_id:
            raise ValueError("the tokenizer has no <|im_end|>; rsi speaks Qwen's chat layout")
        self.end_id: int = end
        ends = {end, tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")}
        self.stop_ids: frozenset[int] = frozenset(i for i in ends if isinstance(i, int))
        self._result_frame = self._cut_result_frame()
        self._user_frame = self._cut_user_frame()

    def prompt(self, system: str, user: str) -> tuple[int, ...]:
        """Ids of a fresh conversation, up to where the assistant speaks."""
        frame = self._render([_message("system", "\1S\1"), _message("user", "\1U\1")])
        before, rest = frame.split("\1S\1")
        between, after = rest.split("\1U\1")
        return (
            *self._frame_ids(before),
            *self._content_ids(system),
            *self._frame_ids(between),
            *self._content_ids(user),
            *self._frame_ids(after),
        )

    def observation(self, text: str, sampled: Sequence[int]) -> tuple[int, ...]:
        """Ids of a tool's result after `sampled`, up to where the assistant speaks again. Closes an unended turn."""
        before, after = self._result_frame
        closing = () if sampled and sampled[-1] == self.end_id else (self.end_id,)
        return (*closing, *self._frame_ids(before), *self._content_ids(text), *self._frame_ids(after))

    def user_message(self, text: str, sampled: Sequence[int]) -> tuple[int, ...]:
        """As `observation`, for a further message of the user: a submission that was sent back."""
        before, after = self._user_frame
        closing = () if sampled and sampled[-1] == self.end_id else (self.end_id,)
        return (*closing, *self._frame_ids(before), *self._content_ids(text), *self._frame_ids(after))

    def assistant(self, text: str) -> tuple[int, ...]:
        """Ids of an assistant's text with its stop id, as a policy would sample it; used to write traces."""
        return (*self._frame_ids(text), self.end_id)

    def parse(self, sampled: Sequence[int]) -> Call | Final | Malformed:
        return parse_call(self.decode([i for i in sampled if i not in self.stop_ids]))

    def decode(self, ids: Sequence[int]) -> str:
        """Text with special tokens shown."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _render(self, messages: list[dict[str, Any]]) -> str:
        return self._tokenizer.apply_chat_template(
            messages, tools=[BASH_TOOL], add_generation_prompt=True, tokenize=False, enable_thinking=self._thinking
        )

    def _cut_result_frame(self) -> tuple[str, str]:
        """What the template puts between an assistant's <|im_end|> and a result, and after the result."""
        call = {"type": "function", "function": {"name": "bash", "arguments": {"command": "\1A\1"}}}
        stub = {"role": "assistant", "content": "", "tool_calls": [call]}
        text = self._render([_message("user", "\1U\1"), stub, _message("tool", "\1R\1")])
        before, after = text.split("\1R\1")
        return before[before.rindex("<|im_end|>") + len("<|im_end|>") :], after

    def _cut_user_frame(self) -> tuple[str, str]:
        """What the template puts between an assistant's <|im_end|> and a user's message, and after it."""
        text = self._render([_message("user", "\1U\1"), _message("assistant", "\1A\1"), _message("user", "\1R\1")])
        before, after = text.split("\1R\1")
        return before[before.rindex("<|im_end|>") + len("<|im_end|>") :], after

    def _frame_ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False) if text else []

    def _content_ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True) if text else []


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
