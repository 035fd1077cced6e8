"""Small file and text chores with coreutils, composed into chains: the world of the embedded model.

A chore is one line of instruction and the one command that does it; a task is `depth` chores over one or two input
files, most of them working on what the chore before left. Names and words are two syllables (`kame`, `tuli`), split by
a hash into those that seeds use and those that only the held-out suite uses: a model must copy names it never saw.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rsi.harbor.snapshot import snapshot_tests
from rsi.harbor.task import new_task_files, task_from_files
from rsi.sandbox import Entry
from rsi.types import Task

CONSONANTS = "bdfgklmnprst"
FIRST = tuple(c + v for c in CONSONANTS for v in "aou")
SECOND = tuple(c + v for c in CONSONANTS for v in "ei")
"""A word is a first and a second syllable. The two sets share none, so a syllable tells which half it is: a small model
learned to copy names in a quarter of the tokens that it took with one set for both."""
MAX_SEED_DEPTH = 2
"""Seeds stop here: what is deeper has to come from the proposer."""

Split = Literal["seed", "heldout"]
World = Mapping[str, tuple[str, ...] | None]
"""Path -> lines of a text file, or None for a folder or an archive."""


def split_of(word: str) -> Split:
    """One word in five belongs to the held-out suite alone."""
    return "heldout" if hashlib.sha256(word.encode()).digest()[0] % 5 == 0 else "seed"


class Words:
    """Draws the words of one task. No two begin alike: a model that has copied a first syllable finds one
    continuation of it."""

    def __init__(self, split: Split, rng: np.random.Generator):
        self._split, self._rng, self._left = split, rng, [str(first) for first in rng.permutation(FIRST)]

    def new(self) -> str:
        first = self._left.pop()
        return first + self.second(first)

    def second(self, first: str) -> str:
        """A second syllable that makes a word of the split with `first`."""
        while True:
            second = SECOND[self._rng.integers(len(SECOND))]
            if split_of(first + second) == self._split:
                return second


@dataclass(frozen=True)
class Chore:
    """One line of a task. `after` is the world that the command leaves."""

    family: str
    text: str
    command: str
    source: str
    target: str
    after: World


@dataclass(frozen=True)
class Chain:
    """A task before it is written down: its input files and its chores."""

    before: World
    chores: tuple[Chore, ...]
    words: Words = field(compare=False)
    """Draws more words for it."""

    @property
    def depth(self) -> int:
        return len(self.chores)


Lines = tuple[str, ...]


@dataclass(frozen=True)
class _TextFamily:
    """Reads one text file, writes another. Slots: a, b files; w a word of a; v a new word; n a small number."""

    phrasings: tuple[str, ...]
    command: str
    apply: Callable[[Lines, dict[str, str]], Iterable[str]]


def _cells(line: str, n: str) -> str:
    cells = line.split(",")
    return cells[int(n) - 1] if int(n) <= len(cells) else line


def _total(lines: Lines, s: dict[str, str]) -> list[str]:
    return [str(sum(int(_cells(line, s["n"])) for line in lines))]


LINE_FAMILIES: dict[str, _TextFamily] = {
    "sort": _TextFamily(
        ("Sort {a} into {b}.", "Put the lines of {a} in order in {b}."),
        "sort {a} > {b}",
        lambda lines, s: sorted(lines),
    ),
    "distinct": _TextFamily(
        ("Put the distinct lines of {a} in {b}, sorted.", "Sort {a} without repeats into {b}."),
        "sort -u {a} > {b}",
        lambda lines, s: sorted(set(lines)),
    ),
    "reverse": _TextFamily(
        ("Reverse the lines of {a} into {b}.", "Put {a} from last line to first in {b}."),
        "tac {a} > {b}",
        lambda lines, s: reversed(lines),
    ),
    "keep": _TextFamily(
        ("Keep the lines of {a} with {w} in {b}.", "Find {w} in {a}, into {b}."),
        "grep {w} {a} > {b}",
        lambda lines, s: [line for line in lines if s["w"] in line],
    ),
    "drop": _TextFamily(
        ("Drop the lines of {a} with {w}, into {b}.", "Put {a} without {w} in {b}."),
        "grep -v {w} {a} > {b}",
        lambda lines, s: [line for line in lines if s["w"] not in line],
    ),
    "first": _TextFamily(
        ("Put the first {n} lines of {a} in {b}.", "Copy the top {n} lines of {a} to {b}."),
        "head -n {n} {a} > {b}",
        lambda lines, s: lines[: int(s["n"])],
    ),
    "last": _TextFamily(
        ("Put the last {n} lines of {a} in {b}.", "Copy the bottom {n} lines of {a} to {b}."),
        "tail -n {n} {a} > {b}",
        lambda lines, s: lines[-int(s["n"]) :],
    ),
    "count": _TextFamily(
        ("Count the lines of {a} into {b}.", "Write to {b} how many lines {a} has."),
        "wc -l < {a} > {b}",
        lambda lines, s: [str(len(lines))],
    ),
    "replace": _TextFamily(
        ("Replace {w} by {v} in {a}, into {b}.", "Put {a} in {b} with {w} changed to {v}."),
        "sed s/{w}/{v}/g {a} > {b}",
        lambda lines, s: [line.replace(s["w"], s["v"]) for line in lines],
    ),
    "capitals": _TextFamily(
        ("Write {a} in capitals to {b}.", "Turn {a} into capitals in {b}."),
        "tr a-z A-Z < {a} > {b}",
        lambda lines, s: [line.upper() for line in lines],
    ),
    "number": _TextFamily(
        ("Number the lines of {a} into {b}.", "Put {a} with line numbers in {b}."),
        "cat -n {a} > {b}",
        lambda lines, s: [f"{i:6d}\t{line}" for i, line in enumerate(lines, 1)],
    ),
}
TABLE_FAMILIES: dict[str, _TextFamily] = {
    "column": _TextFamily(
        ("Put column {n} of {a} in {b}.", "Cut column {n} out of {a} into {b}."),
        "cut -d, -f{n} {a} > {b}",
        lambda lines, s: [_cells(line, s["n"]) for line in lines],
    ),
    "sum": _TextFamily(
        ("Sum column {n} of {a} into {b}.", "Add up column {n} of {a} in {b}."),
        "awk -F, '{{s+=${n}}} END {{print s}}' {a} > {b}",
        _total,
    ),
}
WORD_FAMILIES = ("keep", "drop", "replace")
"""Need a word that stands in their file."""
FILE_FAMILIES = ("rename", "folder", "archive", "private")
PAIR_FAMILIES = ("join", "field")
FAMILIES = (*LINE_FAMILIES, *TABLE_FAMILIES, *FILE_FAMILIES, *PAIR_FAMILIES)


def first_file(rng: np.random.Generator, words: Words, kind: str) -> dict[str, Lines]:
    """Input files of a task: a word list, a table, two tables to join, or a JSON object."""
    name = words.new()
    if kind == "field":
        record = {words.new(): words.new() for _ in range(3)}
        return {f"{name}.json": (json.dumps(record),)}
    if kind == "lines":
        vocabulary = [words.new() for _ in range(3)]
        return {f"{name}.txt": tuple(vocabulary[i] for i in rng.permutation([0, 1, 2, *rng.integers(3, size=2)]))}
    keys = sorted(words.new() for _ in range(3))
    table = {f"{name}.csv": tuple(f"{key},{rng.integers(2, 100)}" for key in keys)}
    if kind == "join":
        table[f"{words.new()}.csv"] = tuple(f"{key},{words.new()}" for key in keys)
    return table


def _words_in(lines: Lines) -> list[str]:
    return [cell for line in lines for cell in line.split(",") if cell.isalpha() and cell.islower()]


def _droppable(lines: Lines) -> list[str]:
    """Words that some line lacks: dropping any other leaves nothing, and grep calls that a failure."""
    return [word for word in _words_in(lines) if any(word not in line for line in lines)]


def _text_chore(name: str, family: _TextFamily, world: World, a: str, rng: np.random.Generator, words: Words) -> Chore:
    lines = world[a]
    assert lines is not None
    cells = _words_in(lines)
    if name == "drop":
        cells = _droppable(lines)
    column = 2 if name == "sum" else int(rng.integers(1, 3))
    slots = {
        "a": a,
        "b": f"{words.new()}.txt",
        "w": str(rng.choice(cells)) if cells else "",
        "v": words.new(),
        "n": str(column if name in TABLE_FAMILIES else rng.integers(2, 4)),
    }
    text = str(rng.choice(family.phrasings)).format(**slots)
    after = {**world, slots["b"]: tuple(family.apply(lines, slots))}
    return Chore(name, text, family.command.format(**slots), a, slots["b"], after)


def _file_chore(name: str, world: World, a: str, rng: np.random.Generator, words: Words) -> Chore:
    new = words.new()
    extension = a[a.rindex(".") :]
    match name:
        case "rename":
            b = new + extension
            after = {(b if path == a else path): lines for path, lines in world.items()}
            texts, command = (f"Rename {a} to {b}.", f"Give {a} the name {b}."), f"mv {a} {b}"
        case "folder":
            b = new
            after = {**world, b: None, f"{b}/{a}": world[a]}
            texts = (f"Copy {a} into the new folder {b}.", f"Make the folder {b} and copy {a} to it.")
            command = f"mkdir {b} && cp {a} {b}"
        case "archive":
            b = f"{new}.tar"
            after = {**world, b: None}
            texts, command = (f"Pack {a} into {b}.", f"Make the archive {b} of {a}."), f"tar cf {b} {a}"
        case _:
            b, after = a, dict(world)
            texts = (f"Make {a} private to its owner.", f"Let only its owner read {a}.")
            command = f"chmod 600 {a}"
    return Chore(name, str(rng.choice(texts)), command, a, b, after)


def _join_chore(world: World, rng: np.random.Generator, words: Words) -> Chore:
    a, c = [path for path in world if path.endswith(".csv")][:2]
    b = f"{words.new()}.txt"
    right = dict(line.split(",", 1) for line in world[c] or ())
    joined = tuple(f"{line},{right[line.split(',')[0]]}" for line in world[a] or ())
    texts = (f"Join {a} and {c} into {b}.", f"Match {a} with {c} by the first column, into {b}.")
    return Chore("join", str(rng.choice(texts)), f"join -t, {a} {c} > {b}", a, b, {**world, b: joined})


def _field_chore(world: World, a: str, rng: np.random.Generator, words: Words) -> Chore:
    lines = world[a]
    assert lines is not None
    record = json.loads(lines[0])
    key = str(rng.choice(list(record)))
    b = f"{words.new()}.txt"
    texts = (f"Put the field {key} of {a} in {b}.", f"Write the value of {key} in {a} to {b}.")
    command = f'python3 -c \'import json; print(json.load(open("{a}"))["{key}"])\' > {b}'
    return Chore("field", str(rng.choice(texts)), command, a, b, {**world, b: (record[key],)})


def _usable(world: World, suffixes: tuple[str, ...]) -> list[str]:
    """Top-level text files worth working on, oldest first: a one-line result is a dead end."""
    return [p for p, lines in world.items() if lines and len(lines) > 1 and "/" not in p and p.endswith(suffixes)]


def next_chore(world: World, rng: np.random.Generator, words: Words, avoid: frozenset[str] = frozenset()) -> Chore:
    """A chore that can be done in `world`, most often on the newest file, of a family not in `avoid`."""
    options: list[tuple[str, str]] = []
    for path in _usable(world, (".txt", ".csv")):
        families = [*LINE_FAMILIES, *FILE_FAMILIES]
        if path.endswith(".csv"):
            families = [*TABLE_FAMILIES, *TABLE_FAMILIES, "sort", "first", "last", "count", *FILE_FAMILIES]
        lines = world[path] or ()
        if not _words_in(lines):
            families = [family for family in families if family not in WORD_FAMILIES]
        if not _droppable(lines):
            families = [family for family in families if family != "drop"]
        if not all(_cells(line, "2").isdigit() for line in lines):
            families = [family for family in families if family != "sum"]
        options += [(family, path) for family in families if family not in avoid]
    newest = (_usable(world, (".txt", ".csv")) or [""])[-1]
    recent = [option for option in options if option[1] == newest]
    if recent and rng.random() < 0.75:
        options = recent
    if sum(path.endswith(".csv") for path in world) >= 2 and "join" not in avoid:
        return _join_chore(world, rng, words)
    json_files = [path for path in world if path.endswith(".json")]
    if json_files and not options:
        return _field_chore(world, json_files[0], rng, words)
    if json_files and "field" not in avoid and rng.random() < 0.5:
        return _field_chore(world, json_files[0], rng, words)
    family, path = options[int(rng.integers(len(options)))]
    if family in FILE_FAMILIES:
        return _file_chore(family, world, path, rng, words)
    return _text_chore(family, (LINE_FAMILIES | TABLE_FAMILIES)[family], world, path, rng, words)


def draw_chain(depth: int, split: Split, rng: np.random.Generator) -> Chain:
    """A chain of `depth` chores; kinds of input are drawn so that every family gets its share."""
    words = Words(split, rng)
    kind = str(rng.choice(["lines", "table", "join", "field"], p=[0.62, 0.22, 0.08, 0.08]))
    world: World = first_file(rng, words, kind)
    if kind == "field":
        world = {**world, **first_file(rng, words, "lines")}
    before, chores = world, []
    for _ in range(depth):
        chore = next_chore(world, rng, words, frozenset(c.family for c in chores))
        chores.append(chore)
        world = chore.after
    return Chain(before, tuple(chores), words)


def solve_script(commands: Iterable[str]) -> bytes:
    return ("#!/bin/bash\nset -e\n" + "".join(f"{command}\n" for command in commands)).encode()


def text_of(lines: Lines) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def write_chain(chain: Chain) -> dict[str, bytes]:
    """The Harbor files of a chain, with the tests that `snapshot-tests` would write from a real run."""
    name = hashlib.sha256("\n".join(c.command for c in chain.chores).encode()).hexdigest()[:12]
    files = new_task_files(f"rsi/terminal-{name}")
    files["instruction.md"] = text_of(tuple(chore.text for chore in chain.chores))
    files["solution/solve.sh"] = solve_script(chore.command for chore in chain.chores)
    for path, lines in chain.before.items():
        files[f"environment/files/{path}"] = text_of(lines or ())
    before = {path: Entry("file", 0o644, text_of(lines or ())) for path, lines in chain.before.items()}
    for path, content in snapshot_tests(before, _outcome(chain)).items():
        files[f"tests/{path}"] = content
    return files


def _outcome(chain: Chain) -> dict[str, Entry]:
    """What /app holds once the chain is done, as the sandbox would hand it out."""
    world: dict[str, Entry] = {path: Entry("file", 0o644, text_of(lines or ())) for path, lines in chain.before.items()}
    for chore in chain.chores:
        match chore.family:
            case "rename":
                world[chore.target] = world.pop(chore.source)
            case "folder":
                world[chore.target] = Entry("dir", 0o755)
                copied = world[chore.source]
                world[f"{chore.target}/{chore.source}"] = Entry("file", copied.mode, copied.content)
            case "archive":
                world[chore.target] = Entry("file", 0o644, _tar(chore.source, world[chore.source]))
            case "private":
                world[chore.source] = Entry("file", 0o600, world[chore.source].content)
            case _:
                world[chore.target] = Entry("file", 0o644, text_of(chore.after[chore.target] or ()))
    return world


def _tar(name: str, entry: Entry) -> bytes:
    import io
    import tarfile

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(entry.content), entry.mode
        archive.addfile(member, io.BytesIO(entry.content))
    return buffer.getvalue()


def draw_tasks(num: int, depth: int, split: Split, rng: np.random.Generator) -> list[Task]:
    """`num` distinct tasks of one depth."""
    tasks: dict[str, Task] = {}
    while len(tasks) < num:
        task = task_from_files(write_chain(draw_chain(depth, split, rng)), domain="terminal")
        tasks.setdefault(task.instruction, task)
    return list(tasks.values())


class TerminalDomain:
    """Seeds of depth 1 and 2 in equal parts."""

    name = "terminal"

    def seeds(self, num: int, rng: np.random.Generator) -> list[Task]:
        shallow = draw_tasks(num - num // 2, 1, "seed", rng)
        return shallow + draw_tasks(num // 2, MAX_SEED_DEPTH, "seed", rng)
