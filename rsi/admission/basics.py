"""The gates that look at the plain runs: structure, build, reference, noop, verifier_health and cost.

A verifier that gives no reward is one fault, not three: where the health gate is asked for, it fails there, and
`reference` and `noop` say that they cannot tell.
"""

from __future__ import annotations

import asyncio
import posixpath
import re
from collections.abc import Iterator, Mapping

from rsi.admission.evidence import SOUND, AdmissionConfig, Evidence, Finding, Graded, Unjudged
from rsi.harbor.grade import SolutionRun
from rsi.harbor.image import image_spec
from rsi.harbor.task import TaskError, read_config, task_from_files, verifier_files
from rsi.types import Lineage, Task, Verdict

SCRIPTS = (".sh", ".bash", ".py")
KNOWN_SECTIONS = frozenset(
    "schema_version version source artifacts multi_step_reward_strategy task metadata agent verifier environment "
    "solution steps".split()
)
SEE_HEALTH = "the verifier gives no usable reward: see verifier_health"

INSTALLS = re.compile(
    r"(?:^|[;&|(!]|\bthen\b|\bdo\b|\belse\b|\bsudo\b|\bexec\b)\s*(?:\w+=\S+\s+)*(?:sudo\s+)?"
    r"((?:apt|apt-get|yum|dnf|apk)\s+(?:-\S+\s+)*(?:update|install|add)\b|(?:python3?\s+-m\s+)?pip3?\s+install\b|"
    r"uvx?\s+(?:pip|run|add|sync|--with|-p|-w)\b|uvx\s|npm\s+(?:install|ci)\b|npx\s|cargo\s+install\b|gem\s+install\b|"
    r"go\s+(?:get|install)\b|conda\s+install\b|git\s+clone\s+\S*(?:https?|ssh|git@))"
)
IN_PYTHON = re.compile(r"""["']pip3?["']\s*,\s*["']install["']|pip\.main\(|["'](?:pip3?|apt-get|apt) install\b""")
FETCHES = re.compile(r"(?:curl|wget|urlopen|requests\.\w+|HTTPSConnection)\b[^\n#]*?https?://([\w-]+(?:\.[\w-]+)+)")
LOOPBACK = re.compile(r"^(127\.\d+\.\d+\.\d+|0\.0\.0\.0)$")
NO_NETWORK = re.compile(
    r"Temporary failure in name resolution|Name or service not known|Could not resolve host|Network is unreachable|"
    r"unable to resolve host address|Failed to establish a new connection|getaddrinfo failed",
    re.IGNORECASE,
)


def structure(
    files: Mapping[str, bytes], config: AdmissionConfig, domain: str, lineage: Lineage
) -> tuple[Task, Finding]:
    """A task that can be read, with an image within the subset, and in the loop our verifier.

    Raises TaskError, BuildError.
    """
    task = task_from_files(files, domain, lineage)
    settings = read_config(task.files)
    environment = settings.get("environment", {})
    if not isinstance(environment, dict) or environment.get("network_mode") != "no-network":
        raise TaskError('task.toml has no network_mode = "no-network" under [environment]; add it')
    image_spec(task)
    for path, content in task.files.items():
        if path.startswith(("solution/", "tests/")) and path.endswith(SCRIPTS) and content[:80].startswith(b"#!"):
            if content.partition(b"\n")[0].endswith(b"\r"):
                raise TaskError(f"{path} has Windows line ends, so its interpreter is not found; write plain ones")
    if config.managed_verifier:
        tests = task.under("tests")
        for path, content in verifier_files().items():
            if tests.get(path) != content:
                raise TaskError(f"tests/{path} is not the managed one; run tools/new-task or tools/snapshot-tests")
        if not any(path.startswith("test_") and path.endswith(".py") for path in tests):
            raise TaskError("tests/ has no test_*.py; write tests/test_outputs.py or run tools/snapshot-tests")
    unknown = ", ".join(sorted(map(ascii, settings.keys() - KNOWN_SECTIONS)))
    return task, Finding(note=f"task.toml: unknown keys, ignored: {unknown[:80]}" if unknown else "")


async def build(evidence: Evidence) -> Finding:
    """The image builds. Raises BuildError."""
    await evidence.build_s()
    return SOUND


async def reference(evidence: Evidence) -> Finding:
    """The reference solution earns 1 on each of several fresh instances, and the same tests pass on each."""
    first = None
    for index in range(evidence.config.reference_runs):
        graded = await evidence.reference(index)
        if complaint := exit_complaint(graded.run):
            return Finding(complaint)
        if graded.verdict.reward != 1.0:
            if "verifier_health" in evidence.config.gates and _health_of(graded.verdict):
                raise Unjudged(SEE_HEALTH)
            return Finding(verdict_complaint(graded.verdict))
        first = first or graded
        if _results(graded) != _results(first):
            return Finding("the tests of two fresh instances differ, though all pass; give tests fixed names")
    return SOUND


async def noop(evidence: Evidence) -> Finding:
    """Doing nothing earns little."""
    verdict = await evidence.noop()
    if verdict.reward is None:
        if "verifier_health" in evidence.config.gates:
            raise Unjudged(SEE_HEALTH)
        return Finding(verdict_complaint(verdict))
    limit = 0.0 if evidence.config.strict else evidence.config.noop_below
    if verdict.reward > limit or verdict.reward >= evidence.config.noop_below:
        return Finding(f"doing nothing earns {verdict.reward:.2f}; test more of what the solution changes")
    return SOUND


async def verifier_health(evidence: Evidence) -> Finding:
    """The verifier needs nothing from outside, and writes a reward whatever it finds."""
    if found := next(reaches_out(evidence.task.under("tests")), ""):
        return Finding(f"{found}; grading has no network: put what the tests need into the image")
    runs = {
        "the reference": (await evidence.reference(0)).verdict,
        "a no-op": await evidence.noop(),
        "an empty workdir": await evidence.nothing(),
    }
    for what, verdict in runs.items():
        if complaint := _health_of(verdict):
            return Finding(f"for {what}: {complaint}")
    return SOUND


async def cost(evidence: Evidence) -> Finding:
    """Grading is cheap, and every time limit is wide enough for a machine that is half as fast."""
    config, limits = evidence.config, evidence.task.limits
    first, seen = await asyncio.gather(evidence.reference(0), evidence.look(0))
    build_s = await evidence.build_s()
    if first.run.exit_code is None:
        raise Unjudged("the reference runs out of time: see reference")
    if seen.size_mb > config.max_image_mb:
        return Finding(f"the image adds {seen.size_mb:.0f} MiB to its base; {config.max_image_mb:g} are allowed")
    if build_s > config.max_build_s:
        return Finding(f"the build takes {build_s:.0f} s; at most {config.max_build_s:g} are allowed, make it quicker")
    if first.tests_s > config.max_tests_s:
        return Finding(f"the verifier takes {first.tests_s:.0f} s; at most {config.max_tests_s:g} are allowed")
    for what, seconds, granted, key in (
        ("the reference", first.run_s, limits.agent_timeout_s, "agent.timeout_sec"),
        ("the verifier", first.tests_s, limits.verifier_timeout_s, "verifier.timeout_sec"),
    ):
        if seconds > config.max_time_share * granted:
            return Finding(f"{what} takes {seconds:.1f} s of the {granted:g} s it is granted; raise {key}")
    return Finding(note=f"build {build_s:.1f} s, tests {first.tests_s:.1f} s, image {seen.size_mb:.1f} MiB")


# ---- words for what was seen


def exit_complaint(run: SolutionRun) -> str:
    if run.exit_code == 0:
        return ""
    if run.exit_code is None:
        return "solution/solve.sh ran out of time; make it quicker"
    return last_line(run.log) if run.log.strip() else f"solution/solve.sh ended with exit code {run.exit_code}"


def verdict_complaint(verdict: Verdict) -> str:
    if verdict.reward is None:
        return verdict.log.splitlines()[0] if verdict.log else "the verifier wrote no reward"
    failed = [test for test in verdict.tests if not test.passed]
    if failed:
        return failed[0].message or f"{failed[0].name} fails"
    return f"the tests give {verdict.reward:.2f}, not 1"


def last_line(text: str) -> str:
    """The last line of an error output, without bash's `/solution/solve.sh: line 3: ` before it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("/solution/solve.sh: ") if lines else "the image does not build"


def _results(graded: Graded) -> list[tuple[str, bool]]:
    return sorted((test.name, test.passed) for test in graded.verdict.tests)


def _health_of(verdict: Verdict) -> str:
    """What is wrong with the verifier that gave this; empty for one that only found fault with the outputs."""
    if verdict.reward is None:
        return f"{verdict_complaint(verdict)}; write a number from 0 to 1 on every path"
    said = "\n".join([verdict.log, *(test.message for test in verdict.tests if not test.passed)])
    if verdict.reward < 1.0 and (found := NO_NETWORK.search(said)):
        return f"the verifier wants the network ({found.group(0)}); grading has none"
    return ""


def reaches_out(tests: Mapping[str, bytes]) -> Iterator[str]:
    """Commands of the verifier that install or fetch, each named with its file; comments are no commands."""
    for path, content in sorted(tests.items()):
        if not path.endswith(SCRIPTS):
            continue
        for line in content.decode(errors="replace").splitlines():
            if line.lstrip().startswith("#") or len(line) > 4096:
                continue
            found = (IN_PYTHON if path.endswith(".py") else INSTALLS).search(line)
            if found:
                yield f"tests/{posixpath.basename(path)} installs at test time ({found.group(0).strip()[:40]})"
            for host in FETCHES.findall(line):
                if not LOOPBACK.match(host):
                    yield f"tests/{posixpath.basename(path)} fetches from {host[:40]}"
