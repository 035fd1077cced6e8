"""Run by test_harbor.py in .venv-harbor: providers behind our Protocol, and ours behind Harbor's."""

# pyright: reportMissingImports=false
import asyncio
import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rsi.harbor.task import PEOPLE, new_task_files, task_from_files, write_task
from rsi.sandbox import (
    Backend,
    BuildError,
    Entry,
    HarborConfig,
    Image,
    ImageSpec,
    SandboxConfig,
    SandboxError,
    Step,
    build_backend,
)
from rsi.sandbox.harbor import HarborBackend, NamespaceEnvironment
from rsi.sandbox.harbor_environment import environment_spec, write_folder

from .conftest import NAMESPACES

pytestmark = pytest.mark.usefixtures("runner")
UNNAMED = ("pids", "disk", "inodes")


@pytest.fixture(scope="module")
def config(cache: str) -> SandboxConfig:
    provider = HarborConfig(NAMESPACES, {"cache_dir": cache})
    return SandboxConfig(backend="harbor", cache_dir=cache, accept_missing=UNNAMED, harbor=provider)


def sorting(path: Path, toml: bytes = b"", **files: bytes) -> Path:
    """A task directory: sort kamo.txt into rilo.txt."""
    plain = {
        **new_task_files("sort-names"),
        "instruction.md": b"Sort kamo.txt into rilo.txt.\n",
        "environment/files/kamo.txt": b"b\na\n",
        "solution/solve.sh": b"#!/bin/bash\nset -e\nsort kamo.txt > rilo.txt\n",
        "tests/test_outputs.py": b"def test_a():\n    assert open('rilo.txt').read() == 'a\\nb\\n'\n",
    }
    plain["task.toml"] += toml
    write_task(task_from_files({**plain, **files}, bounds=PEOPLE), path)
    return path


def run_harbor(task: Path, agent: str, jobs: Path, cache: str, *more: str) -> dict:
    """`harbor run` with our provider; the result of its one trial, and under "job" what the command said."""
    harbor = Path(sys.executable).with_name("harbor")
    command = [*(harbor, "run", "-p", task, "-a", agent, "--env", NAMESPACES), "--ek", f"cache_dir={cache}"]
    done = subprocess.run(
        [*command, "-o", jobs, "--job-name", agent, *more], capture_output=True, text=True, timeout=300
    )
    results = [path for path in (jobs / agent).glob("*/result.json")]
    trial = json.loads(results[0].read_text()) if results else {}
    return {**trial, "job": done.stdout + done.stderr, "folder": str(results[0].parent) if results else ""}


# ---- Harbor runs our sandboxes


def test_harbor_run_rewards_the_oracle_and_not_its_absence(tmp_path: Path, cache: str) -> None:
    task = sorting(tmp_path / "t")
    for agent, reward in (("oracle", 1.0), ("nop", 0.0)):
        trial = run_harbor(task, agent, tmp_path / "jobs", cache)
        assert trial.get("exception_info", 1) is None, trial["job"]
        assert trial["verifier_result"] == {"rewards": {"reward": reward}}
        ctrf = json.loads(Path(trial["folder"], "verifier/ctrf.json").read_text())
        assert ctrf["results"]["summary"]["tests"] == 1


# ---- the provider, without the command line


def environment(folder: Path, tmp_path: Path, cache: str, network: str = "no-network", host: bool = False, **config):
    from harbor.models.task.config import EnvironmentConfig, NetworkPolicy
    from harbor.models.trial.paths import TrialPaths

    paths = TrialPaths(tmp_path / "trial")
    paths.mkdir()
    return NamespaceEnvironment(
        environment_dir=folder,
        environment_name="t",
        session_id="t__env",
        trial_paths=paths,
        task_env_config=EnvironmentConfig(network_mode=network, **config),
        network_policy=NetworkPolicy(network_mode=network),
        auto_mounts=[{"type": "bind", "source": "/nowhere", "target": "/logs/agent"}],
        cache_dir=cache,
        host_network=host,
    )


async def test_the_public_network_is_the_hosts_and_given_only_where_that_is_allowed(tmp_path: Path, cache: str) -> None:
    (tmp_path / "Dockerfile").write_text("FROM rsi/base\n")
    with pytest.raises(ValueError, match="host_network=true"):
        environment(tmp_path, tmp_path, cache, "public")
    with pytest.raises(ValueError, match="allowlist.*not supported"):
        environment(tmp_path, tmp_path, cache, "allowlist")
    with socket.create_server(("127.0.0.1", 0)) as server:
        reach = f"exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]}"
        for network, code in (("public", 0), ("no-network", 1)):
            box = environment(tmp_path, tmp_path, cache, network, host=True)
            await box.start(force_build=False)
            assert (await box.exec(reach)).return_code == code
            await box.stop(delete=True)


async def test_commands_files_users_and_times_are_harbors(tmp_path: Path, cache: str) -> None:
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment/Dockerfile").write_text(
        "FROM rsi/base\nWORKDIR /work\nRUN echo built >/built\nUSER nobody\n"
    )
    box = environment(tmp_path / "environment", tmp_path, cache, env={"A": "b"}, memory_mb=256, storage_mb=64)
    await box.start(force_build=False)
    try:
        done = await box.exec("pwd; id -un; echo $A$B; cat /built; echo e >&2; exit 3", env={"B": "c"})
        assert (done.stdout, done.stderr, done.return_code) == ("/work\nnobody\nbc\nbuilt\n", "e\n", 3)
        assert (await box.exec("id -un", user="root")).stdout == "root\n"
        assert (await box.exec("id -u", user=12)).stdout == "12\n"
        with box.with_default_user("root"):
            assert (await box.exec("id -un")).stdout == "root\n"
        assert (await box.exec("touch /logs/agent/x")).return_code == 0  # anyone may write logs
        with pytest.raises(RuntimeError, match="timed out after 1 s"):
            await box.exec("sleep 60", timeout_sec=1)
        source = tmp_path / "source"
        (source / "sub").mkdir(parents=True)
        (source / "sub/run.sh").write_text("echo ran\n")
        (source / "sub/run.sh").chmod(0o755)
        (source / "link").symlink_to("sub/run.sh")
        await box.upload_dir(source, "/up")
        await box.upload_file(source / "sub/run.sh", "/one/file.sh")
        assert (await box.exec("/up/link && /one/file.sh")).stdout == "ran\nran\n"
        await box.exec("mkfifo /up/pipe; ln -s /etc/passwd /up/out", user="root")
        await box.download_dir("/up", tmp_path / "down")
        assert sorted(path.name for path in (tmp_path / "down").rglob("*")) == ["run.sh", "sub"]
        await box.download_file("/one/file.sh", tmp_path / "one/two")
        assert (tmp_path / "one/two").read_text() == "echo ran\n"
        with pytest.raises(FileNotFoundError):
            await box.download_file("/up/out", tmp_path / "passwd")
    finally:
        await box.stop(delete=True)
    with pytest.raises(RuntimeError, match="not started"):
        await box.exec("true")


async def test_trials_of_one_job_share_a_backend_that_ends_with_the_last(tmp_path: Path, cache: str) -> None:
    folder = tmp_path / "environment"
    folder.mkdir()
    (folder / "Dockerfile").write_text("FROM rsi/base\n")
    boxes = [environment(folder, tmp_path / str(i), cache) for i in range(3)]
    await asyncio.gather(*(box.start(force_build=False) for box in boxes))
    pids = {box._sandbox._backend.launcher_pid for box in boxes}
    assert len(pids) == 1
    await boxes[0].stop(delete=True)
    assert (await boxes[1].exec("echo lives")).stdout == "lives\n"
    await asyncio.gather(*(box.stop(delete=True) for box in boxes))
    assert not Path(f"/proc/{pids.pop()}").exists()


def test_what_our_dockerfiles_lack_is_refused_before_anything_starts(tmp_path: Path, cache: str) -> None:
    (tmp_path / "docker-compose.yaml").write_text("services: {}\n")
    with pytest.raises(BuildError, match="compose is not supported"):
        environment(tmp_path, tmp_path, cache)
    (tmp_path / "Dockerfile").write_text("FROM rsi/base\nHEALTHCHECK NONE\n")
    with pytest.raises(BuildError, match="line 2: HEALTHCHECK"):
        environment(tmp_path, tmp_path, cache)
    with pytest.raises(RuntimeError, match="GPU"):
        (tmp_path / "Dockerfile").write_text("FROM rsi/base\n")
        environment(tmp_path, tmp_path, cache, gpus=1)
    with pytest.raises(ValueError, match="Unknown option 'rootfss'"):
        NamespaceEnvironment.parse_options({"rootfss": "x"})


def test_a_prebuilt_image_comes_before_a_dockerfile_unless_a_build_is_forced(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM rsi/base\nCOPY a /a\n")
    (tmp_path / "a").write_text("a")
    assert environment_spec(tmp_path, "org/image", None, force_build=False) == ImageSpec(base="org/image")
    assert environment_spec(tmp_path, "org/image", "/w", force_build=True) == ImageSpec(
        (Step(copy={"/a": b"a"}),), base="rsi/base", workdir="/w"
    )


def test_nothing_is_written_through_a_link_on_the_host(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("v")
    down = tmp_path / "down"
    entries = {
        "a": Entry("link", 0o777, target="../victim"),
        "b": Entry("file", 0o4755, b"b"),
        "c/d": Entry("file", 0, b""),
    }
    assert write_folder(down, entries) == ["a"]
    assert not (down / "a").exists() and (down / "b").stat().st_mode & 0o7777 == 0o755
    (down / "a").symlink_to("../victim")
    for names in ({"a": Entry("file", 0o644, b"x")}, {"../victim": Entry("file", 0o644, b"x")}):
        with pytest.raises(SandboxError, match="outside"):
            write_folder(down, names)
    (down / "s").symlink_to("..")
    with pytest.raises(SandboxError, match="outside"):
        write_folder(down, {"s/victim": Entry("file", 0o644, b"x")})
    assert (tmp_path / "victim").read_text() == "v"


# ---- Harbor's providers behind our Protocol, beyond what the conformance suite asks


async def test_probe_says_what_a_provider_does_not_enforce(config: SandboxConfig) -> None:
    backend = build_backend(config)
    found = await backend.probe()
    assert found.enforced == {"memory", "cpu", "network"} and set(found.missing) == set(UNNAMED)
    strict = HarborBackend(replace(config, accept_missing=()))
    with pytest.raises(SandboxError, match="pids: Harbor has no such limit"):
        await strict.create(Image("x", ()))
    await backend.close()
    docker = HarborBackend(replace(config, harbor=HarborConfig("docker")))
    assert "memory" in (await docker.probe()).enforced
    await docker.close()


async def test_users_variables_and_bases_reach_the_provider(config: SandboxConfig) -> None:
    named = replace(config, harbor=replace(config.harbor, bases={"debian:12": "rsi/base"}))
    backend: Backend = build_backend(named)
    steps = (
        Step(run="echo $MODE >/mode"),
        Step(copy={"/a/one": b"1", "/a/b/two": b"#!/bin/sh\n"}),
        Step(run="id -un >/tmp/who", user="nobody"),
    )
    spec = ImageSpec(steps, (("MODE", "a'b\"$c"),), "/w d", "debian:12", "nobody")
    image = await backend.build(spec)
    sandbox = await backend.create(replace(image, env=(*image.env, ("MORE", "x"))))
    script = "cat /mode /tmp/who; echo $MODE $MORE; pwd; id -un; stat -c %a /a/one /a/b/two"
    lines = (await sandbox.exec(script)).stdout.decode().splitlines()
    assert lines == ["a'b\"$c", "nobody", "a'b\"$c x", "/w d", "nobody", "644", "755"]
    assert (await sandbox.exec("id -un", user="root")).stdout == b"root\n"
    with pytest.raises(SandboxError, match="no snapshots"):
        await sandbox.snapshot()
    await backend.close()
    with pytest.raises(SandboxError, match="closed"):
        await sandbox.exec("true")


async def test_a_memory_hog_dies_and_the_sandbox_lives(config: SandboxConfig) -> None:
    from rsi.sandbox import Limits

    backend = build_backend(config)
    sandbox = await backend.create(await backend.build(ImageSpec()), Limits(memory_mb=64, disk_mb=8))
    hog = await sandbox.exec("head -c 400m /dev/zero | tail -c 400m >/dev/null; echo ${PIPESTATUS[1]}", timeout_s=60)
    assert hog.stdout == b"137\n"
    assert (await sandbox.exec("echo lives")).stdout == b"lives\n"
    await backend.close()


def test_an_unknown_provider_is_told_the_known_ones(config: SandboxConfig) -> None:
    with pytest.raises(ValueError, match="'dockr'.*docker"):
        build_backend(replace(config, harbor=HarborConfig("dockr")))
