"""Whether the answer lies where the solver can read it: the instruction, the image, a repository's history.

Findings are ordered by certainty, and only certain ones fail a task. That a file of the image equals an output is no
leak yet, for a backup is there to be restored; it is one when the reference does as well without that file.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from rsi.admission.evidence import Evidence, Finding, Outputs, Unjudged
from rsi.admission.start_state import MAX_FILE_KB, StartState
from rsi.harbor.task import verifier_files
from rsi.types import Task

MIN_SECRET_CHARS = 6
"""A shorter output (a count, a yes) stands in many a text by chance."""
MIN_SECRET_BYTES = 8
MIN_COMMAND_CHARS = 24
"""Of a solution, all its commands together: `sort a > b` is told by any instruction that asks for it."""
MAX_CANDIDATES = 4
"""Files of the image that equal an output and are tried out; each costs a run of the reference."""
RESERVED = ("/tests", "/solution", "/logs/verifier")
TELLING = re.compile(r"(expected|answer|solution|oracle|golden|ground.?truth|reference|solve\.sh|test_outputs)", re.I)
SCAFFOLD = re.compile(r"^(#|set\s|cd\s|exit\b|then$|fi$|do$|done$|esac$|\}$|\{$|else$|EOF$|PY$|import\s|from\s)")


@dataclass(frozen=True)
class Leak:
    certain: bool
    text: str


async def leakage(evidence: Evidence) -> Finding:
    """Neither the solution nor the expected values can be read before the work is done."""
    task = evidence.task
    graded, before, state = await asyncio.gather(evidence.reference(0), evidence.initial(), evidence.look(0))
    made = new_contents(before, graded.run.outputs)
    leaks = [*in_instruction(task, made), *in_image(task, state), *await _copies(evidence, made, state)]
    leaks.sort(key=lambda leak: not leak.certain)
    if leaks and leaks[0].certain:
        return Finding(f"{leaks[0].text}; take it out")
    return Finding(note=f"perhaps {leaks[0].text}" if leaks else "")


def new_contents(before: Outputs, after: Outputs) -> dict[str, bytes]:
    """The files that the reference made or changed and that say something, by path in the workdir."""
    return {
        path: entry.content
        for path, entry in after.items()
        if entry.kind == "file"
        and entry != before.get(path)
        and len(entry.content) <= MAX_FILE_KB << 10  # no larger file of the image is read either
        and len(entry.content.strip()) >= MIN_SECRET_CHARS
    }


def in_instruction(task: Task, made: Mapping[str, bytes]) -> list[Leak]:
    """What the instruction gives away: the commands of the solution, or a whole output that the solution works out."""
    leaks = []
    told, commands = _squeezed(task.instruction), _commands(task)
    if sum(map(len, commands)) >= MIN_COMMAND_CHARS and all(_squeezed(command) in told for command in commands):
        leaks.append(Leak(True, "the instruction holds every command of the solution"))
    written_down = _squeezed(b"\n".join(task.under("solution").values()).decode(errors="replace"))
    inputs = _squeezed(b"\n".join(task.under("environment").values()).decode(errors="replace"))
    for path, content in made.items():
        value = _squeezed(content.decode(errors="replace"))
        if len(value) >= MIN_SECRET_CHARS and re.search(rf"(?<!\w){re.escape(value)}(?!\w)", told):
            derived = value not in written_down and value not in inputs
            leaks.append(Leak(derived, f"the instruction holds all of {path}, which the solution works out"))
    return leaks


def in_image(task: Task, state: StartState) -> list[Leak]:
    """Tests and solution in the image, whole or as the solution's commands in a row."""
    leaks = []
    for path, seen in sorted(state.tree.items()):
        if seen.kind == "f" and path.startswith(tuple(f"{folder}/" for folder in RESERVED)):
            leaks.append(Leak(True, f"the image holds {path}, where tests, solution and reward have their place"))
    managed = set(verifier_files().values())
    secrets = {
        _squeezed(content.decode(errors="replace")): f"{folder}/{path}"
        for folder in ("tests", "solution")
        for path, content in task.under(folder).items()
        if content not in managed and len(content.strip()) >= MIN_COMMAND_CHARS
    }
    commands = "\n".join(_commands(task))
    for path, content in sorted(state.files.items()):
        text = _squeezed(content.decode(errors="replace"))
        if text in secrets:
            certain = not secrets[text].startswith("tests/") or secrets[text].endswith((".py", ".sh"))
            leaks.append(Leak(certain, f"{path} in the image is {secrets[text]}"))
        elif len(commands) >= MIN_COMMAND_CHARS and commands in "\n".join(_significant(content)):
            leaks.append(Leak(True, f"{path} in the image holds the commands of the solution"))
        elif TELLING.search(path.rpartition("/")[2]):
            leaks.append(Leak(False, f"{path} in the image has a telling name"))
    return leaks


async def _copies(evidence: Evidence, made: Mapping[str, bytes], state: StartState) -> list[Leak]:
    """Files of the image (or blobs of its repositories) that are an output, and that the reference can do without."""
    by_content = {content: path for path, content in made.items() if len(content) >= MIN_SECRET_BYTES}
    same = [(path, by_content[content]) for path, content in sorted(state.files.items()) if content in by_content]
    same += [(repository, path) for path, content in made.items() for repository in in_history(content, state)]
    leaks = []
    if same and not (await evidence.reference(0)).is_right:
        raise Unjudged("the reference does not earn 1, so what lies in the image cannot be told from its inputs")
    for path, output in same[:MAX_CANDIDATES]:
        without = await evidence.attempt(_without(path, evidence.task))
        text = f"{path} in the image holds {output} already"
        leaks.append(Leak(without.is_right, f"{text}, and the reference does without it" if without.is_right else text))
    return leaks


def in_history(content: bytes, state: StartState) -> list[str]:
    """The `.git` directories of the image whose objects, loose or packed, hold this content."""
    name = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    loose, packed = f"/objects/{name[:2]}/{name[2:]}", bytes.fromhex(name)
    found = {path.removesuffix(loose) for path in state.tree if path.endswith(f".git{loose}")}
    indices = {path: content for path, content in state.files.items() if path.endswith(".idx")}
    found |= {path.partition("/objects/pack/")[0] for path, content in indices.items() if packed in content}
    return sorted(found)


def _without(path: str, task: Task) -> bytes:
    """A script that removes a file and then does what the reference does."""
    script = task.files["solution/solve.sh"]
    return f"rm -rf -- {shlex.quote(path)}\n".encode() + script


def _commands(task: Task) -> list[str]:
    return _significant(task.files["solution/solve.sh"])


def _significant(content: bytes) -> list[str]:
    """Lines that do something, without indentation."""
    lines = (" ".join(line.split()) for line in content.decode(errors="replace").splitlines())
    return [line for line in lines if len(line) > 3 and not SCAFFOLD.match(line)]


def _squeezed(text: str) -> str:
    return " ".join(text.split())
