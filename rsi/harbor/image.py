"""A task's image, and that of a verifier with one of its own, as an `ImageSpec`.

What our sandboxes cannot run is refused here by the name of its key: an environment that differs from what its author
wrote makes a task that nobody can trust.
"""

from __future__ import annotations

from collections.abc import Mapping

from rsi.harbor.config import MAIN, EnvironmentConfig, StepConfig, TaskConfig, artifact_of
from rsi.harbor.task import bundled_tests, is_reserved, task_config, verifier_environment
from rsi.sandbox import BuildError, ImageSpec, Step
from rsi.sandbox.dockerfile import DOCKERFILE, dockerfile_spec
from rsi.types import Task

COMPOSE = "docker-compose.yaml"


def image_spec(task: Task) -> ImageSpec:
    """What to build for a task. Raises BuildError for what its Dockerfile or task.toml say outside the subset."""
    config = task_config(task)
    check_runnable(task, config)
    return _environment_spec(task, config.environment, task.workdir)


def verifier_spec(task: Task, step: StepConfig | None = None) -> tuple[ImageSpec, bool]:
    """The image of a separate verifier, and whether it bundles the tests (harbor.md section 3). Raises BuildError."""
    config = task_config(task)
    check_runnable(task, config)
    environment = verifier_environment(config, step)
    assert environment is not None, "a shared verifier has no image of its own"
    bundled = bundled_tests(task.files, config, step)
    if bundled is None:
        return _environment_spec(task, config.environment, environment.workdir or task.workdir), False
    if bundled.startswith("image:"):
        return ImageSpec(base=bundled.removeprefix("image:"), workdir=environment.workdir or task.workdir), True
    context = task.under(bundled)
    file = f"{bundled}/Dockerfile"
    return dockerfile_spec(task.files[file], context, environment.workdir, file), True


def _environment_spec(task: Task, environment: EnvironmentConfig, workdir: str) -> ImageSpec:
    content = task.files.get(DOCKERFILE)
    if environment.docker_image:
        # Loose files beside a prebuilt image lie in the workdir; beside a Dockerfile they are its context.
        loose = {} if content is not None else task.under("environment")
        steps = (Step(copy={f"{workdir}/{path}": content for path, content in loose.items()}),) if loose else ()
        return ImageSpec(steps, base=environment.docker_image, workdir=workdir)
    if content is None:
        raise BuildError(f"{DOCKERFILE} is missing; write FROM rsi/base, WORKDIR /app, COPY files/ /app/")
    return dockerfile_spec(content, task.under("environment"), workdir)


def check_runnable(task: Task, config: TaskConfig) -> None:
    """Raise BuildError for the first thing that our sandboxes do not have."""
    for complaint in refusals(task.files, config):
        raise BuildError(complaint)
    if is_reserved(task.workdir):
        raise BuildError(f"the workdir {task.workdir} belongs to the system and cannot be graded; use /app")


def refusals(files: Mapping[str, bytes], config: TaskConfig) -> list[str]:
    """What of a task our sandboxes cannot run, a line each; empty: it runs."""
    found = [
        f"{path}: compose is not supported; make it one Dockerfile, or run the task with Harbor's docker environment"
        for path in files
        if path.rpartition("/")[2] == COMPOSE and path.split("/")[0] in ("environment", "tests", "steps")
    ]
    found += _environment_refusals("environment", config.environment)
    agents = [("agent", config.agent), *((f"steps.{step.name}.agent", step.agent) for step in config.steps or ())]
    baseline = config.environment.network_mode
    for name, agent in agents:
        if agent.network_mode not in (None, baseline):
            found.append(f"{name}.network_mode: the network of a sandbox cannot change; leave it out or use {baseline}")
    verifiers = [("verifier", config.verifier)]
    verifiers += [(f"steps.{step.name}.verifier", step.verifier) for step in config.steps or ()]
    for name, verifier in verifiers:
        if verifier.environment is not None:
            found += _environment_refusals(f"{name}.environment", verifier.environment)
        if verifier.network_mode == "allowlist":
            found.append(_no_allowlist(name))
        found += [f"{name}.collect: no service is called {h.service}" for h in verifier.collect if h.service != MAIN]
    artifacts = [*config.artifacts, *(entry for step in config.steps or () for entry in step.artifacts)]
    for artifact in map(artifact_of, artifacts):
        if artifact.service not in (None, MAIN):
            found.append(f"artifacts: no service is called {artifact.service}")
        if not artifact.source.startswith("/"):
            # Harbor looks in the workdir whether it is a directory, and its docker provider then copies it from /.
            found.append(f"artifacts: {artifact.source} is relative to the workdir or to /; write it from / on")
    return found


def _environment_refusals(name: str, environment: EnvironmentConfig) -> list[str]:
    wanted = {
        "gpus": bool(environment.gpus),
        "gpu_types": bool(environment.gpu_types),
        "tpu": environment.tpu is not None,
        "mcp_servers": bool(environment.mcp_servers),
        "skills_dir": environment.skills_dir is not None,
    }
    found = [
        f"{name}.{key}: not supported by our sandboxes; remove it" for key, is_wanted in wanted.items() if is_wanted
    ]
    if environment.os != "linux":
        found.append(f"{name}.os = {environment.os}: only linux runs here")
    if environment.network_mode == "allowlist":
        found.append(_no_allowlist(name))
    return found


def _no_allowlist(name: str) -> str:
    return f"{name}.network_mode = allowlist: a sandbox has the host's network or none; use no-network"
