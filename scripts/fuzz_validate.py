"""Damaged task directories through `rsi validate`: each must get a verdict, soon, and nothing may get out.

    python scripts/fuzz_validate.py [--cases 1000] [--seed 0] [--jobs N] [--keep DIR] [--json]

Every case is a small sound task with one to three damages out of DAMAGES, some of them hostile. Reported are the
verdicts, the gates that failed, crashes (`rsi broke`, or a verdict that is not whole), cases that took longer than they
may, and leaks: text of files outside of the task in a verdict, or a change to them. Exit status 1 if there is any.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rsi.admission.command import CommandConfig, to_json, validate_directories
from rsi.admission.validate import ALL_GATES, Validation
from rsi.harbor.task import new_task_files, task_from_files, task_toml, write_task
from rsi.sandbox.host import remove_tree
from rsi.types import TaskLimits

SECRET = "the-secret-outside-of-every-task"
MAX_CASE_S = 180.0
"""Of one gate, on two busy cores; the seeds grant themselves 3 s for a run."""
AT_ONCE = 23
"""Cases that share a backend, as the tasks of one `rsi validate` do."""
LIMITS = TaskLimits(agent_timeout_s=3.0, verifier_timeout_s=3.0, build_timeout_s=5.0, storage_mb=32)
BASH_TEST = b"""#!/bin/bash
if diff <(sort words.txt) sorted.txt >/dev/null 2>&1; then reward=1; else reward=0; fi
echo $reward >/logs/verifier/reward.txt
"""
FILES = (
    "task.toml",
    "instruction.md",
    "environment/Dockerfile",
    "environment/files/words.txt",
    "solution/solve.sh",
    "tests/test.sh",
    "tests/test_outputs.py",
)

Damage = Callable[[Path, random.Random], None]


def seeds() -> list[dict[str, bytes]]:
    """Two sound tasks: one under our verifier, one under a script of its own and with a step to build."""
    plain = {
        **new_task_files("fuzz"),
        "task.toml": task_toml("fuzz", LIMITS),
        "instruction.md": b"Sort the lines of words.txt into sorted.txt.\n",
        "environment/files/words.txt": b"pear\nfig\nplum\n",
        "solution/solve.sh": b"#!/bin/bash\nset -e\nsort words.txt > sorted.txt\n",
        "tests/test_outputs.py": b"def test_it():\n    assert open('sorted.txt').read() == 'fig\\npear\\nplum\\n'\n",
    }
    own = {path: content for path, content in plain.items() if path != "tests/verify.py"}
    own["tests/test.sh"] = BASH_TEST
    own["environment/Dockerfile"] += b"RUN mkdir -p /opt/tool\nENV MODE=fast\n"
    return [plain, own]


# ---- damages: each changes a written task directory


def flip_bytes(task: Path, rng: random.Random) -> None:
    path = _some_file(task, rng)
    content = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 8)):
        if content:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def insert_bytes(task: Path, rng: random.Random) -> None:
    path = _some_file(task, rng)
    content = path.read_bytes()
    where = rng.randint(0, len(content))
    path.write_bytes(content[:where] + rng.randbytes(rng.randint(1, 64)) + content[where:])


def cut(task: Path, rng: random.Random) -> None:
    path = _some_file(task, rng)
    path.write_bytes(path.read_bytes()[: rng.randint(0, max(path.stat().st_size - 1, 0))])


def remove(task: Path, rng: random.Random) -> None:
    path = _some_file(task, rng)
    path.unlink()


def remove_folder(task: Path, rng: random.Random) -> None:
    remove_tree(str(task / rng.choice(("environment", "solution", "tests"))))


def swap_lines(task: Path, rng: random.Random) -> None:
    path = _some_file(task, rng)
    lines = path.read_bytes().splitlines(keepends=True)
    rng.shuffle(lines)
    path.write_bytes(b"".join(lines))


def long_line(task: Path, rng: random.Random) -> None:
    path = _some_file(task, rng)
    path.write_bytes(path.read_bytes() + rng.choice((b"a", b"\\\n", b"$a", b"(", b"[", b".", b'"')) * (10 << 20))


def almost_too_long_line(task: Path, rng: random.Random) -> None:
    path = _some_file(task, rng)
    piece = rng.choice((b"# a", b"$A ", b"\\\n ", b"((", b"\"' ", b"a=b "))
    path.write_bytes(path.read_bytes() + piece * ((900 << 10) // len(piece)))


def not_utf8(task: Path, rng: random.Random) -> None:
    path = _some_file(task, rng)
    path.write_bytes(path.read_bytes() + b"\xff\xfe\x00\xc3\x28 \xed\xa0\x80\n")


def link_out(task: Path, rng: random.Random) -> None:
    _replace_by_link(_some_file(task, rng), rng.choice(("/etc/hostname", str(task.parent / "secret"), "/dev/zero")))


def link_in_circles(task: Path, rng: random.Random) -> None:
    path = _some_file(task, rng)
    _replace_by_link(path, path.name)
    (task / "environment" / "loop").symlink_to("..", target_is_directory=True)


def folder_link_out(task: Path, rng: random.Random) -> None:
    (task / rng.choice(("environment/files/all", "tests/all", "solution/all"))).symlink_to("/etc")


def pipe(task: Path, rng: random.Random) -> None:
    path = _some_file(task, rng)
    path.unlink()
    os.mkfifo(path)


def socket_file(task: Path, rng: random.Random) -> None:
    path = task / "tests" / "s"
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(path.parent, os.O_RDONLY)
        try:
            server.bind(f"/proc/self/fd/{here}/s")
        finally:
            os.close(here)


def folder_for_file(task: Path, rng: random.Random) -> None:
    path = _some_file(task, rng)
    path.unlink()
    path.mkdir()


def file_for_folder(task: Path, rng: random.Random) -> None:
    folder = task / rng.choice(("environment", "solution", "tests"))
    remove_tree(str(folder))
    folder.write_bytes(b"not a folder\n")


def deep_folders(task: Path, rng: random.Random) -> None:
    here = os.open(task / "environment", os.O_RDONLY)
    for _ in range(rng.choice((40, 1500))):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)


def many_files(task: Path, rng: random.Random) -> None:
    for number in range(3000):
        (task / "tests" / f"{number}.txt").write_bytes(b"x")


def strange_names(task: Path, rng: random.Random) -> None:
    folder = os.fsencode(task / "environment" / "files")
    os.makedirs(folder, exist_ok=True)
    for name in (
        b"\xff\xfe",
        b"a\nb",
        b"-rf",
        b"x" * 255,
        b"..",
        b"\x1b[2J",
        "\u202etxt".encode(),
        b"$(id)",
        b"a b'\"",
    ):
        if name != b"..":
            with open(folder + b"/" + name, "wb") as file:
                file.write(b"strange\n")


def toml_bomb(task: Path, rng: random.Random) -> None:
    bomb = rng.choice(
        (
            b"a = " + b"[" * 5000 + b"]" * 5000,
            b"a = " + b"{a=" * 900 + b"1" + b"}" * 900,
            b".".join([b"a"] * 5000) + b" = 1",
            b"\n".join(b"[" + b".".join([b"t%d" % i] * 40) + b"]" for i in range(300)),
            b"a = " + b"9" * 12_000,
            b"[environment]\ncpus = 1e308\nmemory_mb = " + b"9" * 400 + b'\nnetwork_mode = "no-network"',
            b"[environment]\nworkdir = 7\n",
            b"environment = 3\n",
            b'environment = []\nagent = "x"\n',
            b"[agent]\ntimeout_sec = nan\n",
            b"[[steps]]\nname = '../../x'\n",
            b'[environment]\nnetwork_mode = "no-network"\nstorage = "999999999G"\n',
        )
    )
    (task / "task.toml").write_bytes(bomb)


def dockerfile_bomb(task: Path, rng: random.Random) -> None:
    bomb = rng.choice(
        (
            "ENV A=aaaaaaaaaa\n" + "ENV A=$A$A$A$A$A$A$A$A\n" * 60,
            "ARG A=aaaaaaaaaa\n" + "ARG A=$A$A$A$A$A$A$A$A\n" * 60,
            "RUN " + "true && " * 20_000 + "true\n",
            "COPY files/ files/ " + "files/ " * 20_000 + "/app/\n",
            'RUN ["' + "a" * 500_000 + '"]\n',
            "RUN " + "[" * 200_000 + "\n",
            "WORKDIR /app/" + "x/" * 20_000 + "\n",
            "WORKDIR $HOME/../../etc\n",
            "USER root:$(id)\n",
            "RUN :(){ :|:& };:\n",
            "RUN rm -rf --no-preserve-root / || true\n",
            "RUN head -c 9G /dev/zero > /fill\n",
            "RUN mkdir -p /tests /solution /logs/verifier && echo 1 > /logs/verifier/reward.txt\n",
            "RUN rm -f /usr/bin/find /bin/bash\n",
            "RUN ln -sf /proc/1/root /app/root; ln -s /dev/zero /app/zero\n",
            "RUN mkfifo /app/pipe /tmp/pipe; printf x > $'/app/a\\nb'\n",
        )
    )
    path = task / "environment" / "Dockerfile"
    path.write_text(path.read_text() + bomb if path.is_file() else bomb)


def hostile_script(task: Path, rng: random.Random) -> None:
    script = rng.choice(
        (
            ":(){ :|:& };:; :\n",
            "while :; do :; done\n",
            "sleep 1000\n",
            "setsid sleep 1000 & disown; exit 0\n",
            "yes | head -c 500M\n",
            "head -c 9G /dev/zero > /app/fill\n",
            "rm -rf --no-preserve-root / 2>/dev/null\n",
            "kill -9 -1\n",
            "kill -9 1; kill -9 $PPID\n",
            "cat /etc/hostname /proc/1/environ > /app/sorted.txt; ln -s /etc/shadow /app/s\n",
            "mkdir -p /app/$(printf 'd/%.0s' $(seq 1500)) 2>/dev/null; cd /app; while mkdir d && cd d; do :; done\n",
            "for i in $(seq 30000); do : > /app/$i; done\n",
            "mkfifo /logs/verifier/reward.txt; mkfifo /app/sorted.txt\n",
            "rm -rf /logs/verifier; ln -s / /logs/verifier\n",
            "mkdir /logs/verifier/reward.json\n",
            "head -c 3M /dev/zero > /logs/verifier/reward.txt\n",
            'printf \'{"reward": %s}\' $(printf "[%.0s" $(seq 9000)) > /logs/verifier/reward.json\n',
            "echo 1e999 > /logs/verifier/reward.txt\n",
            "printf '\\xff\\x00' > /logs/verifier/reward.txt; printf '\\xff\\xfe' > $'/app/\\xff'\n",
            "exec 3<>/dev/tcp/127.0.0.1/22\n",
            "exec python3 -c 'import os; os.kill(os.getpid(), 11)'\n",
            "chmod 000 /app; chmod 000 /\n",
            "ulimit -n 4; exec >/dev/full\n",
        )
    )
    path = task / rng.choice(("solution/solve.sh", "tests/test.sh"))
    path.parent.mkdir(exist_ok=True)
    before = path.read_bytes() if path.is_file() and rng.random() < 0.5 else b"#!/bin/bash\n"
    path.write_bytes(before + script.encode())


def hostile_test(task: Path, rng: random.Random) -> None:
    source = rng.choice(
        (
            "import os\nos._exit(0)\n",
            "def test_a():\n    import sys\n    sys.exit(0)\n",
            "def test_a():\n    while True:\n        pass\n",
            "def test_a():\n    raise SystemExit('\\udcff' * 100000)\n",
            "def test_a():\n    assert False, '\\x00\\x1b[2J' * 100000\n",
            "import ctypes\nctypes.string_at(0)\n",
            "x = " + "(" * 5000 + ")" * 5000 + "\n",
            "def test_a():\n    a = [b'x' * (1 << 30) for _ in range(9)]\n",
            "".join(f"def test_{i}():\n    pass\n" for i in range(20_000)),
            "import sys\nsys.setrecursionlimit(1 << 30)\ndef test_a():\n    test_a()\n",
        )
    )
    path = task / "tests" / "test_outputs.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)


DAMAGES: tuple[Damage, ...] = (
    flip_bytes,
    insert_bytes,
    cut,
    remove,
    remove_folder,
    swap_lines,
    long_line,
    almost_too_long_line,
    not_utf8,
    link_out,
    link_in_circles,
    folder_link_out,
    pipe,
    socket_file,
    folder_for_file,
    file_for_folder,
    deep_folders,
    many_files,
    strange_names,
    toml_bomb,
    dockerfile_bomb,
    hostile_script,
    hostile_test,
)


def _some_file(task: Path, rng: random.Random) -> Path:
    """A regular file of the task that earlier damages have left."""
    left = [task / path for path in FILES if (task / path).is_file() and not (task / path).is_symlink()]
    if left:
        return rng.choice(left)
    (task / "instruction.md").unlink(missing_ok=True)
    (task / "instruction.md").write_bytes(b"x\n")
    return task / "instruction.md"


def _replace_by_link(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


# ---- running


@dataclass(frozen=True)
class Case:
    path: Path
    damages: tuple[str, ...]


def make_case(folder: Path, number: int, seed: int) -> Case:
    """The number-th case, always the same for one seed; every damage has its turn as the first of a case."""
    rng = random.Random(f"{seed} {number}")
    path = folder / f"case-{number}"
    write_task(task_from_files(seeds()[rng.randrange(2)]), path)
    first = DAMAGES[number % len(DAMAGES)]
    damages = [first, *rng.choices(DAMAGES, k=rng.choice((0, 0, 0, 1, 2)))]
    for damage in damages:
        try:
            damage(path, rng)
        except (OSError, UnicodeDecodeError):
            continue  # an earlier damage took what this one wanted
    return Case(path, tuple(damage.__name__ for damage in damages))


def fault_of(case: Case, validation: Validation, seconds: float) -> str:
    """What is wrong with a verdict, whatever it says of the task; empty for a good one."""
    line = json.dumps(to_json(case.path, validation))
    names = [gate["name"] for gate in json.loads(line)["gates"]]
    if names != list(ALL_GATES):
        return f"not a whole verdict: {names}"
    if broke := [gate.reason for gate in validation.gates if "rsi broke" in gate.reason]:
        return f"crash: {broke[0]}"
    if SECRET in line:
        return "leak: the verdict tells what stands outside of the task"
    return f"hang: {seconds:.0f} s" if seconds > MAX_CASE_S else ""


async def fuzz(num_cases: int, seed: int, jobs: int | None, folder: Path) -> dict[str, Any]:
    config = CommandConfig()
    if jobs:
        config = replace(config, sandbox=replace(config.sandbox, max_alive=jobs))
    (folder / "secret").write_text(SECRET)
    verdicts, failed, faults, unjudged = Counter[str](), Counter[str](), [], []
    slowest, started = (0.0, ""), time.monotonic()
    for first in range(0, num_cases, AT_ONCE):
        cases = [make_case(folder, number, seed) for number in range(first, min(first + AT_ONCE, num_cases))]
        judging = validate_directories([case.path for case in cases], config, None, lambda path, validation: None)
        try:
            validations = await asyncio.wait_for(judging, AT_ONCE * MAX_CASE_S)
        except Exception as error:
            faults += [{"damages": [case.damages for case in cases], "fault": f"crash or hang: {error!r}"}]
            validations = []
        for case, validation in zip(cases, validations, strict=False):
            seconds = max(gate.seconds for gate in validation.gates)
            slowest = max(slowest, (seconds, f"{case.path.name} {' '.join(case.damages)}"))
            verdicts[{True: "sound", False: "unsound", None: "unjudged"}[validation.valid]] += 1
            failed.update([gate.name for gate in validation.gates if gate.passed is False][:1])
            about = {"case": case.path.name, "damages": case.damages}
            if validation.valid is None:
                unjudged.append({**about, "complaint": validation.complaint})
            if fault := fault_of(case, validation, seconds):
                faults.append({**about, "fault": fault})
        if (folder / "secret").read_text() != SECRET:
            faults.append({"damages": [case.damages for case in cases], "fault": "escape: a file outside has changed"})
        for case in cases:
            remove_tree(str(case.path))
        print(f"{first + len(cases)} cases, {dict(verdicts)}, {len(faults)} faults", file=sys.stderr, flush=True)
    return {
        "cases": num_cases,
        "seed": seed,
        "verdicts": dict(verdicts),
        "first_failed": dict(failed),
        "faults": faults,
        "unjudged": unjudged,
        "slowest_s": round(slowest[0], 1),
        "slowest": slowest[1],
        "wall_s": round(time.monotonic() - started, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--keep", type=Path, help="make the cases here, and do not run them")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
        for number in range(args.cases):
            print(*(case := make_case(args.keep, number, args.seed)).damages, case.path)
        return 0
    folder = tempfile.mkdtemp(prefix="rsi-fuzz-")
    try:
        summary = asyncio.run(fuzz(args.cases, args.seed, args.jobs, Path(folder)))
    finally:
        remove_tree(folder)  # rmtree recurses, and some cases nest deeper than Python does
    if args.json:
        print(json.dumps(summary))
    else:
        for name, value in summary.items():
            print(f"{name:14} {value}")
    return 1 if summary["faults"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
