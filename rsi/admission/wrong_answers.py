"""Whether the tests look: references with a step less or another (mutation), and outputs that are only there
(plausible_wrong).

A mutant counts if its outputs differ from the reference's in more than files that nobody asked for: dropping an `echo`
proves nothing, nor does a scratch file left behind.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rsi.admission.evidence import Evidence, Finding, Graded, Outputs
from rsi.sandbox import Entry
from rsi.types import Task

CONSTANT = b"0\n"
CHECK_S = 20.0
MAX_LINES = 400
SPARE = 3
"""Mutants drawn for one that is run: some will not parse."""
INTEGER = re.compile(r"(?<![\w$&<>.{-])(\d{1,9})(?![\w>.])")
ALTERATIONS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\bsort\b(?!\.)"), "sort -r"),
    (re.compile(r"\bsorted\("), "list("),
    (re.compile(r"=="), "!="),
    (re.compile(r"(?<=\s)-gt(?=\s)"), "-lt"),
    (re.compile(r"\bgrep (?!-)"), "grep -v "),
    (re.compile(r"(?<=[\w)\]]) \+ (?=[\w(])"), " - "),
    (re.compile(r"'([A-Za-z_]{3,})'"), r"'\1x'"),
    (re.compile(r'"([A-Za-z_]{3,})"'), r'"\1x"'),
)
"""What is tried on a line without a number, in this order."""
INERT = re.compile(r"^(#|set\s|then$|fi$|do$|done$|esac$|else$|\{$|\}$|;;$|exit\b|echo\s[^>|]*$|sleep\s)")


@dataclass(frozen=True)
class Mutant:
    """One line of a file of the solution, replaced or (None) dropped. number: of the line, counted from 1."""

    path: str
    number: int
    line: str | None

    @property
    def what(self) -> str:
        return f"line {self.number} of {self.path} {'dropped' if self.line is None else 'altered'}"

    def applied(self, task: Task) -> bytes:
        """The file with that line changed."""
        lines = _lines(task.files[f"solution/{self.path}"])
        lines[self.number - 1 : self.number] = [] if self.line is None else [self.line]
        return "\n".join(lines).encode(errors="surrogateescape")


async def mutation(evidence: Evidence) -> Finding:
    """Most references with one step dropped or altered lose reward."""
    first, start, volatile = await evidence.right_reference(), await evidence.initial(), await evidence.volatile()
    drawn = sample(mutants_of(evidence.task), SPARE * evidence.config.mutants)
    chosen = sample(await _that_parse(evidence, drawn), evidence.config.mutants)
    task = await evidence.hurried()

    async def run(mutant: Mutant) -> Graded:
        changed = replace(task, files={**task.files, f"solution/{mutant.path}": mutant.applied(task)})
        outcome = await evidence.grader.run_solution(changed)
        same = not differs(first.run.outputs, outcome.outputs, start, volatile)
        verdict = first.verdict if same else await evidence.grader.grade(task, outcome.outputs)
        return Graded(outcome, verdict, 0.0, 0.0)

    ran = await asyncio.gather(*(run(mutant) for mutant in chosen))
    survived, killed = [], 0
    for mutant, graded in zip(chosen, ran, strict=True):
        if not differs(first.run.outputs, graded.run.outputs, start, volatile) or graded.verdict.reward is None:
            continue
        if graded.verdict.reward < 1.0:
            killed += 1
        else:
            survived.append(mutant.what)
    if not survived and not killed:
        return Finding(note="no mutant of the solution left other outputs")
    score = killed / (killed + len(survived))
    counted = f"{killed} of {killed + len(survived)} altered solutions lose reward"
    if score < evidence.config.min_mutation_score:
        return Finding(f"{counted}; with {survived[0]} it still earns 1: test what that step does")
    return Finding(note=f"{counted}" + (f"; not with {survived[0]}" if survived else ""))


def differs(right: Outputs, other: Outputs, start: Outputs, volatile: frozenset[str]) -> bool:
    """Whether outputs differ in a path that the reference left, or in one of the start state that it did not."""
    paths = ({*right, *start} & {*right, *other}) - volatile
    return any(right.get(path) != other.get(path) for path in paths)


def mutants_of(task: Task) -> list[Mutant]:
    """Every line of the solution's scripts dropped once, and altered once where something in it can be; drops first,
    each kind in the order of the lines."""
    dropped, altered = [], []
    for path, content in sorted(task.under("solution").items()):
        if not path.endswith((".sh", ".py")):
            continue
        for number, line in enumerate(_lines(content)[:MAX_LINES], start=1):
            if not line.strip() or INERT.match(line.strip()):
                continue
            dropped.append(Mutant(path, number, None))
            if changed := altered_line(line):
                altered.append(Mutant(path, number, changed))
    return [*dropped, *altered]


def _lines(content: bytes) -> list[str]:
    return content.decode(errors="surrogateescape").split("\n")


def altered_line(line: str) -> str:
    """The line with one constant, order or comparison changed; empty where there is none."""
    if len(line) > 4096:
        return ""
    numbers = list(INTEGER.finditer(line))
    if numbers:
        last = numbers[-1]
        return f"{line[: last.start()]}{int(last.group(1)) + 1}{line[last.end() :]}"
    for pattern, replacement in ALTERATIONS:
        changed = pattern.sub(replacement, line, count=1)
        if changed != line:
            return changed
    return ""


def sample(mutants: list[Mutant], most: int) -> list[Mutant]:
    """At most so many, evenly spaced over all: two thirds of them drops."""
    dropped = [mutant for mutant in mutants if mutant.line is None]
    altered = [mutant for mutant in mutants if mutant.line is not None]
    num_altered = min(len(altered), max(most // 3, most - len(dropped)))
    return [*_spaced(dropped, most - num_altered), *_spaced(altered, num_altered)]


def _spaced(mutants: list[Mutant], most: int) -> list[Mutant]:
    if len(mutants) <= most:
        return mutants
    return [mutants[i * len(mutants) // most] for i in range(most)]


async def _that_parse(evidence: Evidence, mutants: list[Mutant]) -> list[Mutant]:
    """Without those that bash or Python cannot even read: they would be killed by anything. Read in a sandbox."""
    if not mutants:
        return []
    names = {f"{number}.{mutant.path[-2:]}": mutant for number, mutant in enumerate(mutants)}
    image = await evidence.grader.build(evidence.task)
    sandbox = await evidence.grader.backend.create(replace(image, user=""))
    try:
        await sandbox.put("/run/mutants", {name: mutant.applied(evidence.task) for name, mutant in names.items()})
        done = await sandbox.exec(PARSE, cwd="/run/mutants", timeout_s=CHECK_S, max_output=1 << 20)
    finally:
        await sandbox.close()
    readable = set(done.stdout.decode(errors="replace").split())
    return [mutant for name, mutant in names.items() if name in readable]


PARSE = """\
for script in *.sh; do [ -e "$script" ] && [ -z "$(bash -n "$script" 2>&1)" ] && echo "$script"; done
compgen -G '*.py' >/dev/null && python3 -I -c '
import ast, sys
for path in sys.argv[1:]:
    try:
        ast.parse(open(path, "rb").read())
        print(path)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass
' *.py
"""


# ---- plausible and wrong


async def plausible_wrong(evidence: Evidence) -> Finding:
    """Outputs of the right names with nothing right in them do not earn everything."""
    first, start, volatile = await evidence.right_reference(), await evidence.initial(), await evidence.volatile()
    limit = evidence.config.noop_below if evidence.config.strict else 1.0
    wrong = [
        (name, outputs)
        for name, outputs in wrong_outputs(start, first.run.outputs)
        if differs(first.run.outputs, outputs, start, volatile)
    ]
    verdicts = await asyncio.gather(*(evidence.grade(outputs) for _, outputs in wrong))
    for (name, _), verdict in zip(wrong, verdicts, strict=True):
        if verdict.reward is not None and verdict.reward >= limit:
            return Finding(f"{name} earn {verdict.reward:.2f}; test what is in the outputs")
    return Finding()


def wrong_outputs(start: Outputs, right: Outputs) -> Iterator[tuple[str, dict[str, Entry]]]:
    """(what they are, outputs): the reference's, with the contents of what it made or changed replaced. A repository
    would hold the right contents still: it is put back to its start."""
    plain = {path: entry for path, entry in right.items() if not _is_of_git(path)}
    plain |= {path: entry for path, entry in start.items() if _is_of_git(path)}
    made = [path for path, entry in plain.items() if entry.kind == "file" and _is_new(entry, start.get(path))]
    if not made:
        return
    yield "empty outputs", {**plain, **{path: replace(plain[path], content=b"") for path in made}}
    yield "constant outputs", {**plain, **{path: replace(plain[path], content=CONSTANT) for path in made}}
    inputs = {path: entry for path, entry in start.items() if entry.kind == "file" and entry.content}
    if inputs:
        copied = {path: replace(plain[path], content=_nearest(path, plain[path], inputs).content) for path in made}
        yield "inputs copied to the outputs", {**plain, **copied}


def _is_of_git(path: str) -> bool:
    return "/.git/" in f"/{path}/"


def _is_new(entry: Entry, before: Entry | None) -> bool:
    """Whether a file has contents that it had not at the start."""
    return bool(entry.content) and (before is None or before.content != entry.content)


def _nearest(path: str, output: Entry, inputs: Outputs) -> Entry:
    """The input that an output was most likely made from: of its own name, else of its ending, else of its length."""

    def unlike(name: str) -> tuple[bool, bool, bool, int, str]:
        entry = inputs[name]
        other_kind = name.rpartition(".")[2] != path.rpartition(".")[2]
        apart = abs(len(entry.content) - len(output.content))
        return entry.content == output.content, name != path, other_kind, apart, name

    return inputs[min(inputs, key=unlike)]
