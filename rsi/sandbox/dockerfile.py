"""A Dockerfile as an `ImageSpec`, for sandboxes that have no Docker.

The common subset is understood: FROM, WORKDIR, COPY, RUN, ENV, ARG, USER; every RUN is one cached layer. All else is
refused by name and line rather than guessed at, because an image that differs from what its author wrote makes a task
that nobody can trust. What a FROM stands for is the backend's to know (`sandbox.bases`).
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from rsi.sandbox import BuildError, ImageSpec, Step

DOCKERFILE = "environment/Dockerfile"
DEFAULT_WORKDIR = "/app"
BASE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MAX_INSTRUCTIONS = 100
MAX_VALUE_CHARS = 64 << 10
"""Of a line after substitution: `ENV A=$A$A`, repeated, doubles for as long as it may."""
SUPPORTED = "FROM, WORKDIR, COPY, RUN, ENV, ARG and USER"
RESERVED = ("/tests", "/solution", "/logs", "/proc", "/dev", "/sys", "/etc", "/usr", "/bin", "/lib", "/sbin", "/var")
"""Not a task's workdir: grading empties the workdir, and puts things of its own at the first three."""


@dataclass(frozen=True)
class Instruction:
    """One Dockerfile instruction; `line` is where it begins, counted from 1."""

    name: str
    rest: str
    line: int
    file: str

    def error(self, found: str, mend: str) -> BuildError:
        return BuildError(f"{self.file} line {self.line}: {self.name}: {found}; {mend}")


@dataclass
class _Build:
    """Where the reading of one Dockerfile stands."""

    base: str = ""
    workdir: str = "/"
    user: str = ""
    env: dict[str, str] = field(default_factory=lambda: {"PATH": BASE_PATH})
    args: dict[str, str] = field(default_factory=dict)
    """Of ARG lines: RUN and later lines see them, the image does not."""
    early_args: dict[str, str] = field(default_factory=dict)
    """Of those before FROM, which see no more than FROM and ARG lines that repeat their name."""
    folders: set[str] = field(default_factory=lambda: {"/", "/tmp", "/root", "/home", "/opt", "/srv"})
    steps: list[Step] = field(default_factory=list)


def dockerfile_spec(
    content: bytes, context: Mapping[str, bytes], workdir: str | None = None, file: str = DOCKERFILE
) -> ImageSpec:
    """What a Dockerfile builds from its context, by path relative to it. Raises BuildError for what lies outside.

    workdir: in place of the last WORKDIR. file: what messages call it.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise BuildError(f"{file} is not utf-8; write it as plain text") from None
    build = _Build()
    for instruction in read_dockerfile(text, file):
        _apply(build, instruction, context)
    env = tuple(sorted(item for item in build.env.items() if item != ("PATH", BASE_PATH)))
    where = workdir or (DEFAULT_WORKDIR if build.workdir == "/" else build.workdir)
    return ImageSpec(tuple(build.steps), env, where, build.base, build.user)


def dockerfile_workdir(text: str) -> str:
    """The last WORKDIR of a Dockerfile, absolute; /app where there is none or the file cannot be read."""
    try:
        instructions = read_dockerfile(text)
    except BuildError:
        return DEFAULT_WORKDIR
    build = _Build()
    for instruction in instructions:
        if instruction.name in ("WORKDIR", "ENV", "ARG"):
            try:
                _apply(build, instruction, {})
            except BuildError:
                return DEFAULT_WORKDIR
    return DEFAULT_WORKDIR if build.workdir == "/" else build.workdir


def read_dockerfile(text: str, file: str = DOCKERFILE) -> list[Instruction]:
    """Split into instructions, with comments dropped and continued lines joined. Raises BuildError."""
    instructions: list[Instruction] = []
    pending, start = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("#") or (not line.strip() and not pending):
            continue
        start = start if pending else number
        if line.rstrip().endswith("\\"):
            pending += line.rstrip()[:-1] + " "
            continue
        name, _, rest = (pending + line).strip().partition(" ")
        pending = ""
        if name:
            instructions.append(Instruction(name.upper(), rest.strip(), start, file))
    if pending:
        raise BuildError(f"{file} line {start}: the last line ends in a backslash; finish the instruction")
    if len(instructions) > MAX_INSTRUCTIONS:
        raise BuildError(f"{file} has {len(instructions)} instructions; write at most {MAX_INSTRUCTIONS}")
    if next((each.name for each in instructions if each.name != "ARG"), "") != "FROM":
        raise BuildError(f"{file} does not begin with FROM; its first line is FROM rsi/base")
    return instructions


def _apply(build: _Build, instruction: Instruction, context: Mapping[str, bytes]) -> None:
    if not instruction.rest:
        raise instruction.error("has no argument", "give it one or remove the line")
    match instruction.name:
        case "FROM":
            words = _words(build, instruction)
            if build.base or len(words) != 1:
                raise instruction.error("more than one stage, or more than a name", "write FROM rsi/base, once")
            build.base, build.early_args, build.args = words[0], build.args, {}
        case "WORKDIR":
            build.workdir = _absolute(instruction, _words(build, instruction, 1)[0], build.workdir)
            build.folders.add(build.workdir)
        case "COPY":
            _copy(build, instruction, context)
        case "RUN":
            _run(build, instruction)
        case "ENV":
            build.env.update(_env(build, instruction))
        case "ARG":
            for word in _words(build, instruction):
                _arg(build, instruction, word)
        case "USER":
            user = _words(build, instruction, 1)[0]
            if not re.fullmatch(r"[a-z_0-9][a-z0-9_-]*(:[a-z_0-9][a-z0-9_-]*)?", user):
                raise instruction.error(f"{user!r} is no user", "write a name or a number, perhaps with :group")
            build.user = "" if user in ("root", "0") else user
        case _:
            raise instruction.error("is not supported", f"use only {SUPPORTED}")


def _run(build: _Build, instruction: Instruction) -> None:
    command = instruction.rest
    if command.startswith("--") or "<<" in command:
        raise instruction.error("flags and here-documents are not supported", "COPY a script in and RUN it")
    if command.startswith("["):
        command = shlex.join(_json_words(instruction, command))
    # The builder knows one environment and one workdir for the whole image; a RUN sees those of its line.
    known = {**build.args, **build.env}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in known.items() if value != BASE_PATH]
    where = shlex.quote(build.workdir)
    if build.user and build.workdir != "/":  # WORKDIR is made by root, whoever runs what follows
        build.steps.append(Step(run=f"mkdir -p {where}"))
    script = "\n".join([*lines, f"mkdir -p {where} && cd {where} || exit", command])
    build.steps.append(Step(run=script, user=build.user))


def _arg(build: _Build, instruction: Instruction, word: str) -> None:
    """One `NAME` or `NAME=default`; there are no build arguments from outside, so a bare name is what FROM knew, or
    unset."""
    name, equals, value = word.partition("=")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise instruction.error(f"cannot read {word!r}", "write ARG NAME=default")
    if equals:
        build.args[name] = value
    elif name in build.early_args:
        build.args[name] = build.early_args[name]


def _copy(build: _Build, instruction: Instruction, context: Mapping[str, bytes]) -> None:
    if instruction.rest.startswith("--"):
        raise instruction.error("flags are not supported", "write COPY source destination")
    words = _words(build, instruction)
    if len(words) < 2:
        raise instruction.error("needs a source and a destination", "write COPY files/ /app/")
    *sources, target = words
    as_folder = target.endswith(("/", "/.")) or target == "." or len(sources) > 1
    target = _absolute(instruction, target, build.workdir)
    as_folder = as_folder or target in build.folders
    copied: dict[str, bytes] = {}
    for source in sources:
        copied.update(_copied(instruction, source, target, as_folder, context))
    for path in copied:
        while path != "/":
            path = posixpath.dirname(path)
            build.folders.add(path)
    build.steps.append(Step(copy=copied))


def _copied(
    instruction: Instruction, source: str, target: str, as_folder: bool, context: Mapping[str, bytes]
) -> dict[str, bytes]:
    """Absolute path in the image -> content, for one source of a COPY; Docker's rules."""
    if any(char in source for char in "*?["):
        raise instruction.error(f"wildcards are not supported ({source})", "name the file or its directory")
    path = posixpath.normpath(source.lstrip("/") or ".")
    if path == ".." or path.startswith("../"):
        raise instruction.error(
            f"{source} lies outside {_folder(instruction)}", f"copy from below {_folder(instruction)} only"
        )
    if path in context:
        where = posixpath.join(target, posixpath.basename(path)) if as_folder else target
        return {where: context[path]}
    prefix = "" if path == "." else path + "/"
    below = {name[len(prefix) :]: content for name, content in context.items() if name.startswith(prefix)}
    if not below:
        raise instruction.error(f"{_folder(instruction)}{path} does not exist", "put a file there or remove the line")
    return {posixpath.join(target, name): content for name, content in below.items()}


def _folder(instruction: Instruction) -> str:
    return instruction.file.rpartition("/")[0] + "/"


def _env(build: _Build, instruction: Instruction) -> dict[str, str]:
    words = _words(build, instruction)
    if "=" not in words[0]:
        name, _, value = instruction.rest.partition(" ")
        pairs = {name: _substitute(build, instruction, value.strip())}
    else:
        if not all("=" in word for word in words):
            raise instruction.error(f"cannot read {instruction.rest!r}", "write ENV NAME=value")
        pairs = {name: value for name, _, value in (word.partition("=") for word in words)}
    for name, value in pairs.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or not value and "=" not in words[0]:
            raise instruction.error(f"cannot read {instruction.rest!r}", "write ENV NAME=value")
    return pairs


def _words(build: _Build, instruction: Instruction, count: int | None = None) -> list[str]:
    rest = instruction.rest
    if rest.startswith("["):
        words = _json_words(instruction, rest)
    else:
        text = _substitute(build, instruction, rest)
        try:
            words = shlex.split(text)
        except ValueError:
            raise instruction.error("has an open quote", "close it") from None
    if not words or count is not None and len(words) != count:
        raise instruction.error(f"has {len(words)} words", f"give it {count or 'at least 1'}")
    return words


def _json_words(instruction: Instruction, text: str) -> list[str]:
    try:
        words = json.loads(text)
    except (ValueError, RecursionError):
        words = None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise instruction.error("is not a JSON list of strings", 'write ["word", "word"] or the plain form')
    return words


def _substitute(build: _Build, instruction: Instruction, text: str) -> str:
    """`$NAME`, `${NAME}` and `${NAME:-default}` from earlier ENV and ARG lines; single quotes are not special here, as
    in Docker's own words."""
    known = {**build.args, **build.env}

    def value(match: re.Match[str]) -> str:
        name, default = match.group(1) or match.group(3), match.group(2)
        if default is not None:
            return known.get(name) or default
        if name not in known:
            raise instruction.error(f"${name} is not set", "set it with ENV or ARG on an earlier line")
        return known[name]

    longest = max(map(len, known.values()), default=0)
    if len(text) > MAX_VALUE_CHARS or text.count("$") * longest > 4 * MAX_VALUE_CHARS:
        raise instruction.error("is too long, or grows too long with its variables", "write a shorter line")
    return re.sub(r"\$(?:\{(\w+)(?::-([^{}]*))?\}|(\w+))", value, text)


def _absolute(instruction: Instruction, path: str, workdir: str) -> str:
    if "\0" in path or ".." in path.split("/"):
        raise instruction.error(f"{path!r} has a '..' in it", "write the path without it")
    return "/" + posixpath.normpath(posixpath.join(workdir, path)).lstrip("/")
