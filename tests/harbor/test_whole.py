"""Tasks with all that Harbor has, run on real sandboxes."""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace

import pytest

from rsi.harbor.config import Healthcheck
from rsi.harbor.grade import Grader, StepsRun, become_healthy
from rsi.harbor.image import image_spec
from rsi.harbor.task import PEOPLE, TaskError, task_config, task_from_files
from rsi.sandbox import Backend, BuildError, Sandbox, SandboxConfig, SandboxError, build_backend
from rsi.types import Task

SMALL = b'[environment]\nnetwork_mode = "no-network"\nmemory_mb = 256\nstorage_mb = 16\n'
DOCKERFILE = b"FROM rsi/base\nWORKDIR /app\nCOPY kamo.txt /app/\n"


def reward_of(test: str) -> bytes:
    return f"#!/bin/bash\nif {test}; then echo 1; else echo 0; fi >/logs/verifier/reward.txt\n".encode()


def whole(toml: bytes = b"", solve: bytes = b"sort kamo.txt >rilo.txt\n", **files: bytes) -> Task:
    plain = {
        "task.toml": SMALL + toml,
        "instruction.md": b"Sort kamo.txt into rilo.txt.",
        "environment/Dockerfile": DOCKERFILE,
        "environment/kamo.txt": b"b\na\n",
        "solution/solve.sh": solve,
        "tests/test.sh": reward_of('[ "$(cat rilo.txt)" = "$(printf \'a\\nb\')" ]'),
    }
    return task_from_files({**plain, **files}, bounds=PEOPLE)


async def oracle_and_nop(grader: Grader, task: Task) -> tuple[float | None, float | None]:
    run = await grader.run_solution(task)
    assert run.exit_code == 0, run.log
    done, undone = await grader.grade(task, run.outputs), await grader.grade(task, await grader.initial(task))
    assert done.reward is not None and undone.reward is not None, (done, undone)
    return done.reward, undone.reward


# ---- users, variables, health


def test_agent_and_verifier_run_as_their_users_with_the_tasks_variables(with_grader) -> None:
    if os.geteuid() != 0:
        pytest.skip("a plain user's sandbox has one id")
    toml = b"""env = { WHO = "kept", HOST = "${SEEN_BY_TASKS}", ELSE = "${NOT_SEEN:-default}" }
[agent]
user = "nobody"
[verifier]
user = 65534
env = { SECRET = "${SEEN_BY_TASKS}" }
[solution]
env = { WHO = "solution" }
"""
    dockerfile = DOCKERFILE + b"RUN chown nobody /app\n"
    solve = b'echo "$(id -un) $WHO $HOST $ELSE" >rilo.txt\n'
    test = '[ "$(cat rilo.txt)/$(id -un)/$SECRET/$WHO" = "nobody solution yes default/nobody/yes/kept" ]'
    task = whole(toml, solve, **{"environment/Dockerfile": dockerfile, "tests/test.sh": reward_of(test)})

    async def main(_: Grader, backend: Backend) -> None:
        assert await oracle_and_nop(Grader(backend, {"SEEN_BY_TASKS": "yes"}), task) == (1.0, 0.0)

    with_grader(main)


def test_a_task_reads_no_variable_of_this_process(with_grader, monkeypatch) -> None:
    monkeypatch.setenv("SEEN_BY_TASKS", "no")
    task = whole(b"[verifier]\nenv = { SECRET = '${SEEN_BY_TASKS}' }\n")

    async def main(grader: Grader, _: Backend) -> None:
        with pytest.raises(BuildError, match="the task wants SEEN_BY_TASKS for SECRET"):
            await grader.grade(task, {})

    with_grader(main)


def test_a_health_check_is_waited_for_and_one_that_never_passes_is_a_fault(with_grader) -> None:
    # The first two tries fail: each leaves a line, and the third finds two of them.
    check = b"healthcheck.command = 'echo x >>/tmp/tries; [ $(wc -l </tmp/tries) -gt %d ]'\n"
    check += b"healthcheck.interval_sec = 0.01\n"

    async def main(grader: Grader, backend: Backend) -> None:
        run = await grader.run_solution(whole(check % 2, b"cp /tmp/tries rilo.txt\n"))
        assert run.outputs["rilo.txt"].content == b"x\n" * 3
        with pytest.raises(SandboxError, match="not healthy after 3 tries"):
            await grader.run_solution(whole(check % 9))
        sandbox = await backend.create(await grader.build(whole()))
        patient = Healthcheck("echo x >>/tmp/tries; [ $(wc -l </tmp/tries) -gt 5 ]", 0.01, 5.0, 60.0, 0.01, retries=1)
        await become_healthy(sandbox, patient)
        await sandbox.close()

    with_grader(main)


# ---- separate verifiers


SEPARATE = b'artifacts = ["/app/rilo.txt", { source = "/app/out", exclude = ["*.log"] }]\n'


def separate(toml: bytes, **files: bytes) -> Task:
    task_toml = SEPARATE + SMALL + b'[verifier]\nenvironment_mode = "separate"\n' + toml
    solve = b"sort kamo.txt >rilo.txt\nmkdir out\necho 1 >out/a.txt\necho 2 >out/b.log\necho 3 >secret\n"
    test = "[ -s /app/rilo.txt ] && [ -s /app/out/a.txt ] && ! [ -e /app/out/b.log ] && ! [ -e /app/secret ]"
    return whole(**{"task.toml": task_toml, "solution/solve.sh": solve, "tests/test.sh": reward_of(test), **files})


def test_only_artifacts_reach_a_separate_verifier_at_their_own_paths(with_grader) -> None:
    async def main(grader: Grader, _: Backend) -> None:
        assert await oracle_and_nop(grader, separate(b"")) == (1.0, 0.0)

    with_grader(main)


def test_a_folder_among_the_artifacts_replaces_the_verifiers_own(with_grader) -> None:
    dockerfile = DOCKERFILE + b"RUN mkdir /app/out && touch /app/out/a.txt /app/out/stale\n"
    solve = b"sort kamo.txt >rilo.txt\necho 1 >out/a.txt\nrm out/stale\n"
    test = reward_of("[ -s /app/out/a.txt ] && ! [ -e /app/out/stale ]")
    files = {"environment/Dockerfile": dockerfile, "solution/solve.sh": solve, "tests/test.sh": test}

    async def main(grader: Grader, _: Backend) -> None:
        assert await oracle_and_nop(grader, separate(b"", **files)) == (1.0, 0.0)

    with_grader(main)


def test_a_verifier_with_its_own_dockerfile_bundles_the_tests(with_grader) -> None:
    bundled = {
        "tests/Dockerfile": b"FROM rsi/base\nRUN echo own >/mark\nCOPY test.sh /tests/test.sh\nCOPY expected /tests/\n",
        "tests/expected": b"a\nb\n",
        "tests/test.sh": reward_of("cmp /app/rilo.txt /tests/expected && [ -e /mark ] && ! [ -e /tests/not-copied ]"),
        "tests/not-copied": b"x",
    }

    async def main(grader: Grader, _: Backend) -> None:
        assert await oracle_and_nop(grader, separate(b"", **bundled)) == (1.0, 0.0)

    with_grader(main)


def test_prebuilt_images_are_found_among_the_bases() -> None:
    toml = SEPARATE + SMALL.replace(b"[environment]", b'[environment]\ndocker_image = "org/agent:1"')
    toml += b'[verifier.environment]\ndocker_image = "org/verifier:1"\nnetwork_mode = "no-network"\n'
    task = separate(b"", **{"task.toml": toml})
    loose = task_from_files({p: c for p, c in task.files.items() if p != "environment/Dockerfile"}, bounds=PEOPLE)

    async def main() -> None:
        backend = build_backend(replace(SandboxConfig(), bases={"org/agent:1": ""}))
        grader = Grader(backend)
        try:
            # Loose files beside a prebuilt image lie in its workdir; a Dockerfile beside it would have been its recipe.
            assert (await grader.run_solution(loose)).exit_code == 0
            assert image_spec(loose).steps[0].copy == {"/app/kamo.txt": b"b\na\n"}
            assert image_spec(task).steps == ()
            with pytest.raises(BuildError, match="org/verifier:1.*sandbox.bases"):
                await grader.grade(loose, {})  # its tests are in that image, so nothing is uploaded in their place
        finally:
            await backend.close()

    asyncio.run(main())


def test_a_collect_hook_saves_what_runs_and_its_failure_is_the_verifiers_to_see(with_grader) -> None:
    hooks = b"""[[verifier.collect]]
command = "kill -USR1 $(cat /tmp/pid); for i in $(seq 200); do [ -e /app/rilo.txt ] && break; sleep 0.01; done; true"
[[verifier.collect]]
command = "exit 9"
user = "nobody"
"""
    server = b"""cat >/tmp/serve <<'X'
trap 'echo served >/app/rilo.txt' USR1
echo $BASHPID >/tmp/pid
while :; do sleep 0.01; done
X
bash /tmp/serve >/dev/null 2>&1 &
while ! [ -s /tmp/pid ]; do sleep 0.01; done
"""

    async def main(grader: Grader, _: Backend) -> None:
        run = await grader.run_solution(separate(hooks, **{"solution/solve.sh": server}))
        assert run.outputs["app/rilo.txt"].content == b"served\n"

    with_grader(main)


def test_an_artifact_cannot_take_the_place_of_the_tests(with_grader) -> None:
    task_toml = b'artifacts = ["/tests", "/logs/verifier"]\n' + SMALL + b'[verifier]\nenvironment_mode = "separate"\n'
    cheat = (
        b"mkdir -p /tests /logs/verifier\nprintf '#!/bin/bash\\necho 1 >/logs/verifier/reward.txt' >/tests/test.sh\n"
    )
    cheat += b"echo '{\"reward\": 1}' >/logs/verifier/reward.json\n"
    task = separate(b"", **{"task.toml": task_toml, "solution/solve.sh": cheat})

    async def main(grader: Grader, _: Backend) -> None:
        run = await grader.run_solution(task)
        assert "tests/test.sh" in run.outputs
        assert (await grader.grade(task, run.outputs)).reward == 0.0

    with_grader(main)


# ---- steps


def stepwise(toml: bytes = b"", first: bytes = b"", **files: bytes) -> Task:
    """Two steps: the first sorts kamo.txt, the second counts what the first left. Each verifier gives 1 or 0."""
    steps = b'[[steps]]\nname = "sort"\n' + first + b'[[steps]]\nname = "count"\n'
    return whole(
        **{
            "task.toml": toml + SMALL + steps,
            "steps/sort/instruction.md": b"Sort kamo.txt into rilo.txt.",
            "steps/sort/solution/solve.sh": b"sort kamo.txt >rilo.txt\n",
            "steps/sort/workdir/kamo.txt": b"c\nb\n",
            "steps/count/instruction.md": b"Count the lines of rilo.txt into n.",
            "steps/count/solution/solve.sh": b"wc -l <rilo.txt >n\n",
            "steps/count/workdir/setup.sh": b"echo ready >ready\n",
            "steps/count/tests/test.sh": reward_of('[ "$(cat n)" -eq 2 ] && grep -q ready ready && . /tests/shared'),
            "tests/test.sh": reward_of("[ -s rilo.txt ] && [ $(head -1 rilo.txt) = b ]"),
            "tests/shared": b"true",
            **files,
        }
    )


def by_step(run: StepsRun) -> Mapping[str, float | None]:
    return {step.name: step.graded.verdict.reward for step in run.steps}


async def nothing(sandbox: Sandbox, step: object) -> None:
    pass


def test_steps_share_one_sandbox_and_each_has_its_verdict(with_grader) -> None:
    async def main(grader: Grader, _: Backend) -> None:
        run = await grader.run_steps(stepwise())
        assert (by_step(run), run.verdict.reward) == ({"sort": 1.0, "count": 1.0}, 1.0)
        run = await grader.run_steps(stepwise(), nothing)
        assert (by_step(run), run.verdict.reward) == ({"sort": 0.0, "count": 0.0}, 0.0)

        async def only_sort(sandbox: Sandbox, step) -> None:
            if step.name == "sort":
                await sandbox.exec("sort kamo.txt >rilo.txt")

        run = await grader.run_steps(stepwise(), only_sort)
        assert (by_step(run), run.verdict.reward) == ({"sort": 1.0, "count": 0.0}, 0.5)
        run = await grader.run_steps(stepwise(b'multi_step_reward_strategy = "final"\n'), only_sort)
        assert run.verdict.reward == 0.0

    with_grader(main)


def test_a_step_below_its_threshold_ends_the_task_and_the_rest_counts_nothing(with_grader) -> None:
    rewards = b'#!/bin/bash\necho \'{"reward": 0.5, "style": 0.2}\' >/logs/verifier/reward.json\n'

    async def main(grader: Grader, _: Backend) -> None:
        low = stepwise(first=b"min_reward = 0.6\n", **{"tests/test.sh": rewards})
        run = await grader.run_steps(low)
        assert by_step(run) == {"sort": 0.5}
        assert run.verdict.reward == 0.25  # of two declared steps; Harbor's mean over reached ones would be 0.5
        assert (await grader.run_steps(replace_first(low, b"min_reward = 0.5\n"))).verdict.reward == 0.75
        for threshold, names in ((b"{ style = 0.3 }", ["sort"]), (b"{ absent = 0.0 }", ["sort"])):
            run = await grader.run_steps(replace_first(low, b"min_reward = " + threshold + b"\n"))
            assert [step.name for step in run.steps] == names
        final = replace_first(low, b"min_reward = 0.6\n", b'multi_step_reward_strategy = "final"\n')
        assert (await grader.run_steps(final)).verdict.reward == 0.0

    with_grader(main)


def replace_first(task: Task, first: bytes, toml: bytes = b"") -> Task:
    return stepwise(toml, first, **{"tests/test.sh": task.files["tests/test.sh"]})


def test_a_step_that_cannot_begin_gives_no_reward_at_all(with_grader) -> None:
    async def main(grader: Grader, _: Backend) -> None:
        run = await grader.run_steps(stepwise(**{"steps/count/workdir/setup.sh": b"echo no >&2\nexit 3\n"}))
        assert by_step(run) == {"sort": 1.0, "count": None}
        assert run.verdict.reward is None and "step count: setup.sh ended with 3: no" in run.verdict.log
        sick = b"[steps.healthcheck]\ncommand = 'false'\nretries = 1\n"
        run = await grader.run_steps(stepwise(first=sick))
        assert run.verdict.reward is None and "not healthy" in run.verdict.log

    with_grader(main)


def test_a_server_of_one_step_is_there_in_the_next_and_gone_after_the_last(with_grader) -> None:
    seen = []

    async def serve(sandbox: Sandbox, step) -> None:
        if step.name == "sort":
            await sandbox.exec("sleep 300 & echo $! >/tmp/pid")
        else:
            seen.append((await sandbox.exec("kill -0 $(cat /tmp/pid)")).exit_code)

    async def main(grader: Grader, _: Backend) -> None:
        await grader.run_steps(stepwise(), serve)
        assert seen == [0]

    with_grader(main)


# ---- what is not run


@pytest.mark.parametrize(
    "toml, complaint",
    [
        (b"gpus = 1\n", "environment.gpus"),
        (b'tpu = { type = "v6e", topology = "2x4" }\n', "environment.tpu"),
        (b'os = "Windows"\n', "environment.os = windows"),
        (b'skills_dir = "/skills"\n', "environment.skills_dir"),
        (b'mcp_servers = [{ name = "m", url = "http://m" }]\n', "environment.mcp_servers"),
        (b'[agent]\nnetwork_mode = "public"\n', "agent.network_mode"),
        (b'[verifier]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.b"]\n', "verifier.network_mode = allowlist"),
        (b"[verifier.environment]\ngpus = 1\n", "verifier.environment.gpus"),
        (b'[[verifier.collect]]\ncommand = "x"\nservice = "db"\n', "no service is called db"),
        (b"[[steps]]\nname = 'a'\nartifacts = ['out']\n", "out is relative to the workdir or to /"),
    ],
)
def test_what_our_sandboxes_lack_is_read_and_refused_by_name(toml: bytes, complaint: str) -> None:
    extra = {"tests/test.bat": b"", "solution/solve.bat": b"", "steps/a/instruction.md": b"x"}
    task = whole(toml, **extra)
    with pytest.raises(BuildError, match=complaint):
        image_spec(task)


def test_compose_and_allowlists_and_system_workdirs_are_refused_by_name() -> None:
    with pytest.raises(BuildError, match="environment/docker-compose.yaml: compose is not supported"):
        image_spec(whole(**{"environment/docker-compose.yaml": b"services: {}\n"}))
    allow = SMALL.replace(b'"no-network"', b'"allowlist"\nallowed_hosts = ["example.org"]')
    with pytest.raises(BuildError, match="environment.network_mode = allowlist"):
        image_spec(whole(**{"task.toml": allow}))
    with pytest.raises(BuildError, match="belongs to the system"):
        image_spec(whole(b'workdir = "/usr/src"\n'))


@pytest.mark.parametrize(
    "toml, complaint",
    [
        (b"[environment.healthcheck]\ncommand = 'x'\n", "environment.healthcheck"),
        (b"[environment]\nenv = { A = '${HOME}' }\n", "environment.env"),
        (b"[environment]\ndocker_image = 'x'\n", "environment.docker_image"),
        (b"[verifier]\nenv = { A = '${OPENAI_API_KEY}' }\n", "verifier.env"),
        (b"[verifier]\nenvironment_mode = 'separate'\n", "verifier.environment_mode"),
        (b"[[verifier.collect]]\ncommand = 'x'\n", "verifier.collect"),
        (b"[agent]\nuser = 'nobody'\n", "agent.user"),
        (b"[solution]\nenv = { A = 'b' }\n", "solution.env"),
    ],
)
def test_a_model_writes_the_plain_kind_of_task_alone(toml: bytes, complaint: str) -> None:
    files = {**whole().files, "task.toml": toml}
    assert task_config(task_from_files(files, bounds=PEOPLE)) is not None
    with pytest.raises(TaskError, match=f"{complaint} is not supported here"):
        task_from_files(files)


def test_the_files_that_a_task_of_its_kind_needs_are_named() -> None:
    def without(task: Task, path: str) -> dict[str, bytes]:
        return {name: content for name, content in task.files.items() if not name.startswith(path)}

    for task, path, named in (
        (whole(), "environment/", "environment/ is missing"),
        (whole(), "tests/test.sh", "tests/test.sh is missing"),
        (whole(), "instruction.md", "instruction.md is missing"),
        (stepwise(), "steps/count/instruction.md", "steps/count/instruction.md is missing"),
        (stepwise(), "tests/", "tests/test.sh is missing"),
    ):
        with pytest.raises(TaskError, match=named):
            task_from_files(without(task, path), bounds=PEOPLE)
    task_from_files(without(whole(), "solution/"), bounds=PEOPLE)
