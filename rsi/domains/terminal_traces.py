"""Traces of both roles that a program writes for the cold start of the embedded model.

A trace is what an able but fallible agent would have done: it looks at files at times, mistypes a name and reads the
error, writes to the wrong file and moves it, forgets a chore and finds it missing; the mistaken turn is shown but never
learned. What the sandbox would have answered is written down here and held against a real sandbox by the tests.

Every task that is solved, and every parent that is changed, is a seed and has at most two chores. Adding a chore to a
parent of two is shown (else a model takes the parent's depth for the direction); solving what comes of it never is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rsi import chat
from rsi.domains.terminal import (
    LINE_FAMILIES,
    MAX_SEED_DEPTH,
    TABLE_FAMILIES,
    Chain,
    Chore,
    Words,
    World,
    draw_chain,
    next_chore,
    write_chain,
)
from rsi.harbor.task import task_from_files
from rsi.types import Assignment, Direction, Role

NO_OUTPUT = "(no output)"
DONE = "Done."
MISSING = "No such file or directory"
ERRORS = {
    "sort": "sort: cannot read: {a}: " + MISSING + "\n[exit 2]",
    "distinct": "sort: cannot read: {a}: " + MISSING + "\n[exit 2]",
    "keep": "grep: {a}: " + MISSING + "\n[exit 2]",
    "drop": "grep: {a}: " + MISSING + "\n[exit 2]",
    "replace": "sed: can't read {a}: " + MISSING + "\n[exit 2]",
    "number": "cat: {a}: " + MISSING + "\n[exit 1]",
    "column": "cut: {a}: " + MISSING + "\n[exit 1]",
    "join": "join: {a}: " + MISSING + "\n[exit 1]",
    "first": "head: cannot open '{a}' for reading: " + MISSING + "\n[exit 1]",
    "last": "tail: cannot open '{a}' for reading: " + MISSING + "\n[exit 1]",
    "reverse": "tac: failed to open '{a}' for reading: " + MISSING + "\n[exit 1]",
    "rename": "mv: cannot stat '{a}': " + MISSING + "\n[exit 1]",
    "private": "chmod: cannot access '{a}': " + MISSING + "\n[exit 1]",
}
"""What a command of a family says when its file {a} is not there, for families whose message is one plain line."""


@dataclass(frozen=True)
class TraceTurn:
    """What the assistant says, whether it is to be learned, and what comes back (None after the last)."""

    says: str
    learn: bool = True
    result: str | None = None
    from_user: bool = False
    """result is a further user message rather than a tool's result."""


@dataclass(frozen=True)
class Trace:
    role: Role
    system: str
    user: str
    turns: tuple[TraceTurn, ...]


def _run(command: str, result: str = NO_OUTPUT, learn: bool = True) -> TraceTurn:
    return TraceTurn(chat.call_text(command), learn, result)


def _listing(world: World, also: Sequence[str] = ()) -> str:
    return "\n".join(sorted({path for path in (*world, *also) if "/" not in path}))


def _mistype(path: str, rng: np.random.Generator, words: Words) -> str:
    """Another name for the path: most often another word, at times one that begins alike."""
    stem, dot, extension = path.partition(".")
    first = stem[:2]
    wrong = first + words.second(first) if rng.random() < 0.25 else words.new()
    return (wrong if wrong != stem else words.new()) + dot + extension


# ---- the solver -------------------------------------------------------------------------------------------------


ALOUD = 0.5
"""Share of solver traces that read the instruction aloud, line by line, and do what a line asks before they read on;
the others act at once, which is shorter and at two chores as good. It is the reading that carries over to more chores
than were shown, because lines that ask for nothing are read as well."""


def solver_trace(chain: Chain, rng: np.random.Generator, asides: bool = True, aloud: float = ALOUD) -> Trace:
    """aloud: chance that the instruction is read line by line."""
    lines = [(chore.text, chore) for chore in chain.chores]
    if asides:
        lines = _with_asides(lines, rng, chain.words)
    instruction = "\n".join(text for text, _ in lines)
    turns = _read_aloud(lines, chain, rng) if rng.random() < aloud else _act(chain, rng)
    return Trace("solver", chat.SYSTEM["solver"], instruction, tuple(turns))


Line = tuple[str, Chore | None]
"""One line of an instruction, and the chore that it asks for if it asks for any."""
ASIDES = ("The folder belongs to {w}.", "Ask {w} if in doubt.", "Do it before {w} comes.", "{w} made the files.")


def _with_asides(lines: Sequence[Line], rng: np.random.Generator, words: Words) -> list[Line]:
    """The lines with up to three among them that ask for nothing. Without those, a model that sees at most two chores
    learns `the first line, then the last`, and with a third chore does neither."""
    lines = list(lines)
    for _ in range(rng.choice(4, p=[0.4, 0.25, 0.2, 0.15])):
        aside = ASIDES[rng.integers(len(ASIDES))].format(w=words.new())
        lines.insert(int(rng.integers(len(lines) + 1)), (aside, None))
    return lines


def _act(chain: Chain, rng: np.random.Generator) -> list[TraceTurn]:
    """One chore after the other; at times the last is forgotten, and a look at the files tells."""
    turns, world, strays = list[TraceTurn](), chain.before, list[str]()
    forgets = chain.depth > 1 and rng.random() < 0.08
    for chore in chain.chores:
        if forgets and chore is chain.chores[-1]:
            turns.append(_run("ls", _listing(world, strays)))
        turns += _do_chore(chore, world, strays, rng, chain.words)
        world = chore.after
    if rng.random() < 0.2:
        turns.append(_run("ls", _listing(world, strays)))
    return [*turns, TraceTurn(DONE)]


def _read_aloud(lines: Sequence[Line], chain: Chain, rng: np.random.Generator) -> list[TraceTurn]:
    turns, world, strays, said = list[TraceTurn](), chain.before, list[str](), ""
    for text, chore in lines:
        said += f"{text}\n"
        if chore is not None:
            first, *rest = _do_chore(chore, world, strays, rng, chain.words)
            turns += [replace(first, says=said + first.says), *rest]
            world, said = chore.after, ""
    return [*turns, TraceTurn(said + DONE)]


def _do_chore(chore: Chore, world: World, strays: list[str], rng: np.random.Generator, words: Words) -> list[TraceTurn]:
    """The turns of one chore; `strays` collects files that a mistake left behind."""
    turns, chance = list[TraceTurn](), rng.random()
    lines = world.get(chore.source)
    if rng.random() < 0.12 and lines:
        turns.append(_run(f"cat {chore.source}", "\n".join(lines)))
    if chance < 0.1 and chore.family in ERRORS:
        wrong = _mistype(chore.source, rng, words)
        command = chore.command.replace(chore.source, wrong, 1)
        turns.append(_run(command, ERRORS[chore.family].format(a=wrong), learn=False))
    elif chance < 0.16 and chore.family in LINE_FAMILIES | TABLE_FAMILIES:
        wrong = _mistype(chore.target, rng, words)
        turns.append(_run(chore.command.replace(f"> {chore.target}", f"> {wrong}"), learn=False))
        turns.append(_run("ls", _listing(world, [*strays, wrong])))
        turns.append(_run(f"mv {wrong} {chore.target}"))
        return turns
    turns.append(_run(chore.command))
    return turns


# ---- the proposer -----------------------------------------------------------------------------------------------


def _append(path: str, *lines: str) -> str:
    body = "".join(f"{line}\n" for line in lines)
    return f"cat >> output/task/{path} <<'E'\n{body}E"


def _add_chore(chore: Chore, command: str | None = None) -> str:
    return f"{_append('instruction.md', chore.text)}\n{_append('solution/solve.sh', command or chore.command)}"


DROP_LAST = "sed -i '$d' output/task/instruction.md output/task/solution/solve.sh"
READ_PARENT = "cd assignment/parent && cat instruction.md solution/solve.sh environment/files/*; cd ../.."
CHECK = "tools/snapshot-tests && tools/validate"


def proposer_trace(chain: Chain, direction: Direction, rng: np.random.Generator) -> Trace:
    """One agent episode. chain is the parent (harden, simplify) or the new task itself (explore)."""
    assignment = assignment_of(chain, direction, rng)
    if direction == "explore":
        turns = _write_new(chain)
        world = chain
    else:
        turns = [_run(READ_PARENT, _shown(chain))]
        edits, world = _edit(chain, direction, rng)
        turns += edits
    turns += [_run(CHECK, _verdict(world)), TraceTurn(DONE)]
    if rng.random() < 0.25:
        turns, world = _revise(turns, world, rng)
    return Trace("proposer", chat.SYSTEM["proposer"], chat.proposer_message(assignment), tuple(turns))


def _edit(chain: Chain, direction: Direction, rng: np.random.Generator) -> tuple[list[TraceTurn], Chain]:
    """Copy the parent and change it: one chore more, one less, or the last one exchanged."""
    copy = "cp -r assignment/parent/. output/task"
    shorter = replace(chain, chores=chain.chores[:-1])
    if direction == "simplify" and chain.depth > 1:
        return [_run(f"{copy}\n{DROP_LAST}")], shorter
    if direction == "simplify":
        copy, chain = f"{copy}\n{DROP_LAST}", shorter
    return _add(copy, chain, rng)


def _add(copy: str, chain: Chain, rng: np.random.Generator) -> tuple[list[TraceTurn], Chain]:
    """Write one chore more down. At times the check finds a slip: a name mistyped in the solution, which an edit mends,
    or a word that the file has not got, after which another chore takes its place."""
    chore, slip = _chore_after(chain, rng), rng.random()
    prefix, turns = f"{copy}\n" if copy else "", list[TraceTurn]()
    if slip < 0.25 and chore.family in ERRORS:
        wrong = _mistype(chore.source, rng, chain.words)
        error = ERRORS[chore.family].format(a=wrong).rpartition("\n")[0]
        turns = [
            _run(prefix + _add_chore(chore, chore.command.replace(chore.source, wrong, 1)), learn=False),
            _run(CHECK, f"reference: {error}\n[exit 1]"),
            _run("sed -i '$d' output/task/solution/solve.sh\n" + _append("solution/solve.sh", chore.command)),
        ]
    elif slip < 0.4 and (text := _newest_text(chain)):
        b, w = f"{chain.words.new()}.txt", chain.words.new()
        bad = Chore("keep", f"Keep the lines of {text} with {w} in {b}.", f"grep {w} {text} > {b}", text, b, {})
        turns = [
            _run(prefix + _add_chore(bad), learn=False),
            _run(CHECK, "reference: solution/solve.sh ended with exit code 1\n[exit 1]"),
            _run(f"{DROP_LAST}\n{_add_chore(chore)}"),
        ]
    else:
        turns = [_run(prefix + _add_chore(chore))]
    return turns, replace(chain, chores=(*chain.chores, chore))


def _newest_text(chain: Chain) -> str:
    world = chain.chores[-1].after if chain.chores else chain.before
    texts = [path for path, lines in world.items() if lines and "/" not in path and path.endswith(".txt")]
    return texts[-1] if texts else ""


def _write_new(chain: Chain) -> list[TraceTurn]:
    files = "\n".join(_append(f"environment/files/{path}", *(lines or ())) for path, lines in chain.before.items())
    texts = _append("instruction.md", *(chore.text for chore in chain.chores))
    commands = _append("solution/solve.sh", *(chore.command for chore in chain.chores))
    return [_run(f"tools/new-task\n{files}"), _run(f"{texts}\n{commands}")]


def _revise(turns: list[TraceTurn], chain: Chain, rng: np.random.Generator) -> tuple[list[TraceTurn], Chain]:
    """The host sends the task back: too easy gets a chore more, too hard one less."""
    easy = chain.depth < MAX_SEED_DEPTH or chain.depth == MAX_SEED_DEPTH and rng.random() < 0.5
    mean = 1.0 if easy else float(rng.choice([0.0, 0.12, 0.25]))
    *before, last = turns
    report = chat.revision_message("too_easy" if easy else "too_hard", mean)
    turns = [*before, replace(last, result=report, from_user=True)]
    if easy:
        added, chain = _add("", chain, rng)
        turns += added
    else:
        chain = replace(chain, chores=chain.chores[:-1])
        turns.append(_run(DROP_LAST))
    return [*turns, _run(CHECK, _verdict(chain)), TraceTurn(DONE)], chain


def _chore_after(chain: Chain, rng: np.random.Generator) -> Chore:
    world = chain.chores[-1].after if chain.chores else chain.before
    return next_chore(world, rng, chain.words, frozenset(chore.family for chore in chain.chores))


def _shown(chain: Chain) -> str:
    files = write_chain(chain)
    inputs = (files[f"environment/files/{path}"] for path in sorted(chain.before))
    return b"".join([files["instruction.md"], files["solution/solve.sh"], *inputs]).decode().rstrip("\n")


def _verdict(chain: Chain) -> str:
    tests = write_chain(chain)["tests/test_outputs.py"].decode()
    return f"wrote {tests.count('def test_')} tests\nvalid"


def assignment_of(chain: Chain, direction: Direction, rng: np.random.Generator) -> Assignment:
    parent = None if direction == "explore" else task_from_files(write_chain(chain), domain="terminal")
    rate = float(rng.uniform(0.75, 1.0) if direction == "harden" else rng.uniform(0.0, 0.25))
    failure = f"{chain.chores[rng.integers(chain.depth)].target} is missing" if rng.random() < 0.8 else ""
    return Assignment("", "terminal", direction, parent, rate, 8, failure)


def one_shot_trace(chain: Chain, direction: Direction, rng: np.random.Generator) -> Trace:
    """The prompt-only arm: the parent's files in the question, every file of the new task in the answer."""
    assignment = assignment_of(chain, direction, rng)
    question = chat.proposer_message(assignment)
    if direction != "explore":
        question += "\n" + _blocks(chain)
        _, chain = _edit(chain, direction, rng)
    return Trace("proposer", chat.ONE_SHOT, question, (TraceTurn(_blocks(chain)),))


def _blocks(chain: Chain) -> str:
    files = write_chain(chain)
    shown = ["instruction.md", "solution/solve.sh", *(f"environment/files/{path}" for path in chain.before)]
    return "\n".join(f"=== {path}\n{files[path].decode().rstrip()}" for path in shown)


# ---- the mixture ------------------------------------------------------------------------------------------------


def draw_trace(rng: np.random.Generator) -> Trace:
    """One trace of the cold start's mixture: 70 % solver, 24 % proposer with a terminal, 6 % prompt only."""
    role = rng.random()
    if role < 0.7:
        return draw_solver_trace(rng)
    direction: Direction = "harden" if rng.random() < 0.6 else "simplify" if rng.random() < 0.5 else "explore"
    trace = proposer_trace if role < 0.94 else one_shot_trace
    return trace(_draw_seed(rng), direction, rng)


def draw_solver_trace(rng: np.random.Generator) -> Trace:
    return solver_trace(_draw_seed(rng), rng)


def _draw_seed(rng: np.random.Generator) -> Chain:
    return draw_chain(int(rng.integers(1, MAX_SEED_DEPTH + 1)), "seed", rng)
