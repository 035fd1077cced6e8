"""Grading in a sandbox that the solver never touched, and runs of the reference solution.

The agent owns the sandbox that it worked in (its bash, its python, whatever waits there for /tests), so only files
cross over (`outputs.collect`), and the tests come in after it is gone: also where Harbor would grade a shared container
in place. A verdict depends on the task and those files alone, so it is kept: many attempts of a group leave the same
files. A verifier that writes no usable reward gives Verdict(None); a sandbox that breaks raises SandboxError; neither
is ever reward 0. A task reads no variable of this process: `${VAR}` comes from the mapping that a Grader is given.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from rsi.harbor.config import (
    AgentConfig,
    EnvironmentConfig,
    Healthcheck,
    NetworkMode,
    StepConfig,
    resolve_env,
)
from rsi.harbor.image import image_spec, verifier_spec
from rsi.harbor.outputs import (
    MAX_OUTPUT_BYTES,
    artifacts,
    check_outputs,
    collect,
    leads_to_tests,
    outputs_digest,
    parent_of,
)
from rsi.harbor.records import FormatError
from rsi.harbor.task import task_config, verifier_environment
from rsi.harbor.verdict import Graded, read_graded, tail
from rsi.sandbox import Backend, BuildError, Entry, Image, Limits, Network, Sandbox, SandboxError
from rsi.types import Task, Verdict

SPARE_MB = 16
SPARE_INODES = 4096
"""Disk of a grading sandbox beyond the task's: a solver that filled its own leaves room for the tests here."""
KEPT_VERDICTS = 4096
STAGE = "/.rsi-outputs"
LOGS = ("/logs/agent", "/logs/verifier", "/logs/artifacts")

Act = Callable[[Sandbox, StepConfig], Awaitable[None]]
"""What the agent does at a step, in its sandbox."""


@dataclass(frozen=True)
class SolutionRun:
    """What a solution left of `collect`; exit_code is None where it ran out of time. log: stderr, else stdout."""

    outputs: Mapping[str, Entry]
    exit_code: int | None
    log: str


@dataclass(frozen=True)
class StepRun:
    """One step that was reached. complaint: why the agent never began it; empty where it did."""

    name: str
    graded: Graded
    complaint: str = ""


@dataclass(frozen=True)
class StepsRun:
    """The steps that were reached, in order; num_declared: of the whole task."""

    steps: tuple[StepRun, ...]
    num_declared: int
    final: bool
    """The last step's reward is the task's; else the mean."""

    @property
    def verdict(self) -> Verdict:
        """Over declared steps: one that was never reached counts 0, so that failing early gains nothing (Harbor leaves
        it out of the mean). None where a reached step has no verdict."""
        for step in self.steps:
            if step.graded.verdict.reward is None:
                return Verdict(None, (), f"step {step.name}: {step.complaint or step.graded.verdict.log}")
        rewards = [step.graded.verdict.reward or 0.0 for step in self.steps]
        tests = tuple(
            replace(test, name=f"{step.name}: {test.name}") for step in self.steps for test in step.graded.verdict.tests
        )
        log = "\n".join(f"{step.name}: {step.graded.verdict.log}" for step in self.steps)
        if self.final:
            reached_last = len(rewards) == self.num_declared
            return Verdict(rewards[-1] if reached_last else 0.0, tests, log)
        return Verdict(sum(rewards) / self.num_declared, tests, log)


class Grader:
    """Runs a task's tests and reference in fresh sandboxes of one backend, and keeps the verdicts."""

    def __init__(self, backend: Backend, env: Mapping[str, str] | None = None, public: Network = "none"):
        """env: what `${VAR}` in a task may read. public: the network of tasks that ask for the public one; `host`
        shares this machine's, loopback services included."""
        self._backend = backend
        self._env = dict(env or {})
        self._public: Network = public
        self._graded: dict[tuple[str, str, str], Graded] = {}
        self._pending: dict[tuple[str, str, str], asyncio.Task[Graded]] = {}
        self._initial: dict[str, dict[str, Entry]] = {}

    @property
    def backend(self) -> Backend:
        return self._backend

    # ---- verdicts

    async def grade(
        self, task: Task, outputs: Mapping[str, Entry], fresh: bool = False, step: StepConfig | None = None
    ) -> Verdict:
        """The verdict on what `collect` brought. `fresh`: run the tests even if the verdict is known.

        Raises SandboxError for our faults and BuildError for a task without an image.
        """
        return (await self._grade(task, outputs, fresh, step)).verdict

    async def _grade(
        self, task: Task, outputs: Mapping[str, Entry], fresh: bool = False, step: StepConfig | None = None
    ) -> Graded:
        if fresh:
            return await self._run_tests(task, outputs, step)
        key = (task.id, step.name if step else "", outputs_digest(outputs))
        if key in self._graded:
            return self._graded[key]
        if key not in self._pending:
            self._pending[key] = asyncio.create_task(self._run_tests(task, outputs, step))
            self._pending[key].add_done_callback(lambda done: self._keep(key, done))
        # Shielded: an attempt that is cancelled must not take the verdict from the others that wait for it.
        return await asyncio.shield(self._pending[key])

    def _keep(self, key: tuple[str, str, str], done: asyncio.Task[Graded]) -> None:
        self._pending.pop(key, None)
        if done.cancelled() or done.exception() is not None:
            return
        graded = done.result()
        if graded.verdict.reward is None:
            return  # a time-out is not a function of the files alone
        if len(self._graded) >= KEPT_VERDICTS:
            self._graded.pop(next(iter(self._graded)))
        self._graded[key] = graded

    # ---- the agent's sandbox

    async def build(self, task: Task) -> Image:
        """The agent's image: its user and variables are the task's. Raises BuildError for what its author wrote,
        SandboxError for our faults."""
        image = await self._backend.build(image_spec(task), task.limits.build_timeout_s)
        config = task_config(task)
        env = dict(image.env) | self._resolve(config.environment.env)
        user = image.user if config.agent.user is None else _user(config.agent.user)
        return replace(image, env=tuple(sorted(env.items())), user=user)

    async def prepare(self, sandbox: Sandbox, task: Task) -> None:
        """What Harbor does between the start of a container and its agent, where a task asks for any of it: the log
        directories, and the health check. Raises SandboxError where the environment does not become healthy."""
        config = task_config(task)
        if config.environment.healthcheck is None and config.verifier_mode() == "shared" and not config.artifacts:
            return
        await _make_logs(sandbox)
        if config.environment.healthcheck is not None:
            await become_healthy(sandbox, config.environment.healthcheck)

    def agent_network(self, task: Task) -> Network:
        return self._network(task_config(task).environment.network_mode)

    def _network(self, mode: NetworkMode) -> Network:
        return self._public if mode == "public" else "none"

    def _resolve(self, env: Mapping[str, str]) -> dict[str, str]:
        try:
            return resolve_env(env, self._env)
        except FormatError as error:
            raise BuildError(f"task.toml: {error}") from None

    async def initial(self, task: Task) -> dict[str, Entry]:
        """What `collect` brings of an instance in which nothing was done; of a plain task, the workdir as the image has
        it."""
        image, config = await self.build(task), task_config(task)
        runs_more = bool(config.verifier.collect or config.environment.healthcheck)
        key = task.id if runs_more or config.verifier_mode() == "separate" else image.id
        if key not in self._initial:
            if len(self._initial) >= KEPT_VERDICTS // 16:
                self._initial.clear()
            async with self._agents(task, 10.0) as sandbox:
                self._initial[key] = await collect(sandbox, task)
        return dict(self._initial[key])

    async def run_solution(self, task: Task, solution: bytes | None = None) -> SolutionRun:
        """Run solution/solve.sh, or `solution` in its place, in a fresh instance under the agent's time limit."""
        files = task.under("solution")
        if solution is not None:
            files["solve.sh"] = solution
        async with self._agents(task, task.limits.agent_timeout_s) as sandbox:
            exit_code, log = await self._solve(sandbox, task, files, task.limits.agent_timeout_s)
            outputs = await collect(sandbox, task)
        return SolutionRun(outputs, exit_code, log)

    async def _solve(
        self, sandbox: Sandbox, task: Task, files: Mapping[str, bytes], timeout_s: float, user: str | None = None
    ) -> tuple[int | None, str]:
        if "solve.sh" not in files:
            raise BuildError("solution/solve.sh is missing; the task has no reference to run")
        env = self._resolve(task_config(task).solution.env)
        await sandbox.put("/solution", files)
        command = ["bash", "/solution/solve.sh"]
        done = await sandbox.exec(command, timeout_s=timeout_s, cwd=task.workdir, env=env, user=user)
        return None if done.timed_out else done.exit_code, tail(done.stderr) or tail(done.stdout)

    @asynccontextmanager
    async def _agents(self, task: Task, timeout_s: float) -> AsyncIterator[Sandbox]:
        async with self._fresh(await self.build(task), self.limits(task, timeout_s), self.agent_network(task)) as box:
            await self.prepare(box, task)
            yield box

    def limits(self, task: Task, wall_s: float, spare: bool = False) -> Limits:
        """Of a task's sandbox that works for `wall_s`."""
        granted = task.limits
        return Limits(
            cpus=granted.cpus,
            memory_mb=granted.memory_mb,
            disk_mb=granted.storage_mb + SPARE_MB * spare,
            inodes=Limits().inodes + SPARE_INODES * spare,
            wall_s=wall_s + 60.0,
        )

    @asynccontextmanager
    async def _fresh(self, image: Image, limits: Limits, network: Network) -> AsyncIterator[Sandbox]:
        sandbox = await self._backend.create(image, limits, network)
        try:
            yield sandbox
        finally:
            await sandbox.close()

    # ---- tests

    async def _run_tests(self, task: Task, outputs: Mapping[str, Entry], step: StepConfig | None) -> Graded:
        """One put, one exec, one get: each costs milliseconds, and there is one of these for each attempt."""
        check_outputs(outputs)
        config = task_config(task)
        verifier = step.verifier if step else config.verifier
        timeout_s = step.verifier.timeout_sec if step else task.limits.verifier_timeout_s
        user = verifier.user if verifier.user is not None else config.verifier.user
        env = self._resolve({**config.verifier.env, **(step.verifier.env if step else {})})
        image, limits, network, staged = await self._verifiers_box(task, outputs, step, timeout_s)
        place = _place_script(task.workdir, config.verifier_mode(step) == "shared", "" if user is None else _user(user))
        run = f"{place} || {{ echo 'rsi: cannot place the outputs' >&2; exit 125; }}; exec /tests/test.sh"
        async with self._fresh(image, limits, network) as sandbox:
            if folders := _replaced(task, outputs, step):
                await sandbox.exec(["rm", "-rf", "--", *folders], cwd="/", user="root")
            await sandbox.put("/", staged)
            if user is not None and _user(user):
                await sandbox.exec(place, timeout_s=timeout_s, cwd="/", user="root")
                run = f"cd {shlex.quote(task.workdir)} && exec /tests/test.sh"
            done = await sandbox.exec(run, timeout_s=timeout_s, cwd="/", env=env, user=_user(user) if user else "root")
            if done.timed_out:
                return Graded(Verdict(None, (), f"the verifier ran longer than {timeout_s:g} s"), {})
            if done.exit_code == 125 and b"rsi: cannot place the outputs" in done.stderr:
                raise SandboxError(f"grading could not fill {task.workdir}: {tail(done.stderr)}")
            logs = await sandbox.get("/logs/verifier", MAX_OUTPUT_BYTES)
        return read_graded(logs, done)

    async def _verifiers_box(
        self, task: Task, outputs: Mapping[str, Entry], step: StepConfig | None, timeout_s: float
    ) -> tuple[Image, Limits, Network, dict[str, bytes | Entry]]:
        """Where the tests run, and what is put there first."""
        config = task_config(task)
        verifier = step.verifier if step else config.verifier
        environment = verifier_environment(config, step)
        staged: dict[str, bytes | Entry] = {"logs/verifier": Entry("dir", 0o777)}
        bundled = False
        if environment is None:
            image = await self._backend.build(image_spec(task), task.limits.build_timeout_s)
            limits, environment, where = self.limits(task, timeout_s, spare=True), config.environment, task.workdir
            staged[STAGE.lstrip("/")] = Entry("dir", 0o755)
            root = STAGE
        else:
            spec, bundled = verifier_spec(task, step)
            image = await self._backend.build(spec, environment.build_timeout_sec)
            limits, where, root = self._verifiers_limits(task, environment, timeout_s), "", ""
        for path, entry in outputs.items():
            if entry.kind != "other" and not leads_to_tests(path, outputs, where) and not _is_ours(path, root):
                staged[f"{root}/{path}".lstrip("/")] = entry
        if not bundled:
            staged["tests"] = Entry("dir", 0o755)
            shared, own = task.under("tests"), task.under(f"steps/{step.name}/tests") if step else {}
            for path, content in {**shared, **own}.items():
                staged[f"tests/{path}"] = Entry("file", 0o755 if path.endswith(".sh") else 0o644, content)
        env = dict(image.env) | self._resolve(environment.env)
        # As root, whatever the image's USER: outputs come back without owners, and the tests must read all of them.
        image = replace(image, user="", env=tuple(sorted(env.items())))
        policy = verifier.policy or config.verifier.policy
        return image, limits, self._network(policy.mode if policy else environment.network_mode), staged

    def _verifiers_limits(self, task: Task, environment: EnvironmentConfig, timeout_s: float) -> Limits:
        granted = self.limits(task, timeout_s, spare=True)
        return replace(
            granted,
            cpus=environment.cpus or granted.cpus,
            memory_mb=environment.memory_mb or granted.memory_mb,
            disk_mb=(environment.storage_mb or task.limits.storage_mb) + SPARE_MB,
        )

    # ---- steps

    async def run_steps(self, task: Task, act: Act | None = None) -> StepsRun:
        """A task with steps, in one sandbox for the agent and a fresh one for each verdict (harbor.md section 5).

        act: the agent; None runs the reference of each step. A step whose setup or health check fails ends the run
        without a reward, one whose reward is below its `min_reward` ends it with one.
        """
        config = task_config(task)
        assert config.steps, "a task without steps is graded by grade()"
        final = config.multi_step_reward_strategy == "final"
        wall_s = sum(_agents_time(task, step) for step in config.steps) + 60.0 * len(config.steps)
        runs: list[StepRun] = []
        async with self._agents(task, wall_s) as sandbox:
            await _make_logs(sandbox)
            for step in config.steps:
                runs.append(await self._run_step(sandbox, task, step, act, end=step is config.steps[-1]))
                if runs[-1].complaint or _is_below(runs[-1].graded.rewards, step.min_reward):
                    break
        return StepsRun(tuple(runs), len(config.steps), final)

    async def _run_step(self, sandbox: Sandbox, task: Task, step: StepConfig, act: Act | None, end: bool) -> StepRun:
        user = _agents_user(task_config(task).agent, step.agent)
        if complaint := await _set_up(sandbox, task, step, user):
            return StepRun(step.name, Graded(Verdict(None, (), complaint), {}), complaint)
        if act is not None:
            await act(sandbox, step)
        else:
            files = task.under(f"steps/{step.name}/solution") or task.under("solution")
            await self._solve(sandbox, task, files, _agents_time(task, step), user)
        outputs = await collect(sandbox, task, step, end)
        return StepRun(step.name, await self._grade(task, outputs, step=step))


def _replaced(task: Task, outputs: Mapping[str, Entry], step: StepConfig | None) -> list[str]:
    """The directories of a separate verifier's image that artifacts take the place of, and do not mix with."""
    config = task_config(task)
    if config.verifier_mode(step) == "shared":
        return []
    sources = [artifact.source.strip("/") for artifact in artifacts(config, step)]
    kept = [path for path in sources if path in outputs and outputs[path].kind == "dir" and not _is_ours(path, "")]
    return [f"/{path}" for path in kept]


def _place_script(workdir: str, is_shared: bool, user: str) -> str:
    """The shell line that puts the outputs in their place, and gives them to the verifier's user, and goes there."""
    where = shlex.quote(workdir)
    place = f"mkdir -p {where}"
    if is_shared:
        place = f"rm -rf -- {where} && mkdir -p {shlex.quote(parent_of(workdir))} && mv -T -- {STAGE} {where}"
    own = f" && chown -R {shlex.quote(user)} {where} /logs/verifier" if user else ""
    return f"{place}{own} && cd {where}"


def _is_ours(path: str, root: str) -> bool:
    """Whether an artifact, which has its own place in the file system, would lie where grading puts things."""
    return not root and f"{path}/".startswith(("tests/", "solution/", "logs/verifier/"))


def _user(user: str | int) -> str:
    return "" if user in ("", "root", 0, "0") else str(user)


def _agents_user(task: AgentConfig, step: AgentConfig) -> str | None:
    user = step.user if step.user is not None else task.user
    return None if user is None else str(user)


def _agents_time(task: Task, step: StepConfig) -> float:
    return step.agent.timeout_sec or task.limits.agent_timeout_s


def _is_below(rewards: Mapping[str, float], threshold: float | Mapping[str, float] | None) -> bool:
    if threshold is None:
        return False
    wanted = threshold if isinstance(threshold, Mapping) else {"reward": threshold}
    return any(rewards.get(key, float("-inf")) < value for key, value in wanted.items())


async def _make_logs(sandbox: Sandbox) -> None:
    folders = " ".join(LOGS)
    await sandbox.exec(f"mkdir -p {folders} && chmod 777 {folders}", cwd="/", user="root")


async def _set_up(sandbox: Sandbox, task: Task, step: StepConfig, user: str | None) -> str:
    """Put a step's workdir/ in place, run its setup.sh, and wait until it is healthy; the complaint where it is not."""
    files = task.under(f"steps/{step.name}/workdir")
    await sandbox.put(task.workdir, files)
    if "setup.sh" in files:
        done = await sandbox.exec(
            ["bash", f"{task.workdir}/setup.sh"], timeout_s=task.limits.build_timeout_s, cwd=task.workdir, user=user
        )
        if done.exit_code != 0:
            ended = "ran out of time" if done.timed_out else f"ended with {done.exit_code}"
            return f"setup.sh {ended}: {tail(done.stderr)[-200:]}"
    if step.healthcheck is not None:
        try:
            await become_healthy(sandbox, step.healthcheck, user)
        except SandboxError as error:
            return str(error)
    return ""


async def become_healthy(sandbox: Sandbox, check: Healthcheck, user: str | None = None) -> None:
    """Run a health check until it passes. Raises SandboxError after `retries` failures outside the start period."""
    began, num_failures = time.monotonic(), 0
    while True:
        grace = time.monotonic() - began < check.start_period_sec
        done = await sandbox.exec(check.command, timeout_s=check.timeout_sec, user=user)
        if done.exit_code == 0:
            return
        num_failures += not grace
        if num_failures >= check.retries and not grace:
            raise SandboxError(f"the environment is not healthy after {num_failures} tries of {check.command[:100]!r}")
        await asyncio.sleep(check.start_interval_sec if grace else check.interval_sec)
