"""The `docker` backend against a real engine (scripts/docker_engine.sh): what is its own, beyond any backend's."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rsi.sandbox import (
    BuildError,
    DockerConfig,
    Entry,
    Image,
    ImageSpec,
    Limits,
    SandboxConfig,
    SandboxError,
    Step,
    build_backend,
    docker_images,
    docker_wire,
)
from rsi.sandbox.docker import DockerBackend
from rsi.sandbox.docker_container import DockerSandbox

from .require import require

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("runner")]

ACCEPTED = ("disk", "inodes")
"""An engine on ext4 has no quota; what has one enforces more than that."""
PATIENCE_S = 300.0
"""For what takes a second on a quiet machine; these tests never measure time."""

HOST = """
import asyncio, sys
from rsi.sandbox import ImageSpec, SandboxConfig
from rsi.sandbox.docker import DockerBackend
async def main():
    backend = DockerBackend(SandboxConfig(cache_dir=sys.argv[1], rootfs=sys.argv[2], accept_missing=("disk", "inodes")))
    sandbox = await backend.create(await backend.build(ImageSpec()))
    await sandbox.snapshot()
    print(sandbox.name, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""

SWEEP = [sys.executable, "-c", "from rsi.cli import main; main()", "sandbox", "sweep", "--json", "backend=docker"]


@pytest.fixture(scope="module")
def config(cache: str) -> SandboxConfig:
    require("docker")
    rootfs = os.environ.get("RSI_TEST_ROOTFS", "")
    return SandboxConfig(backend="docker", cache_dir=cache, rootfs=rootfs, accept_missing=ACCEPTED)


@pytest.fixture(scope="module")
def engine(runner: asyncio.Runner, config: SandboxConfig) -> Iterator[DockerBackend]:
    backend = DockerBackend(config)
    yield backend
    runner.run(backend.close())


@pytest.fixture(scope="module")
def plain(runner: asyncio.Runner, engine: DockerBackend) -> Image:
    return runner.run(engine.build(ImageSpec()))


@pytest.fixture
def crate(runner: asyncio.Runner, engine: DockerBackend, plain: Image) -> Iterator[DockerSandbox]:
    sandbox = runner.run(engine.create(plain, Limits(memory_mb=128, pids=64)))
    yield sandbox
    runner.run(sandbox.close())


async def containers(backend: DockerBackend, name: str = "rsi-") -> list[str]:
    """Names of all containers, running or not, that begin so."""
    found = await backend.call(backend.api.containers, all=True)
    return [each["Names"][0].lstrip("/") for each in found if each["Names"][0].startswith(f"/{name}")]


# ---- commands


async def test_exit_code_streams_environment_and_cwd_are_the_commands_own(crate: DockerSandbox) -> None:
    result = await crate.exec("echo out; echo err >&2; exit 7", timeout_s=PATIENCE_S)
    assert (result.exit_code, result.stdout, result.stderr) == (7, b"out\n", b"err\n")
    assert not (result.timed_out or result.oom or result.streams_open or result.dropped_bytes)
    names = {line.split(b"=")[0] for line in (await crate.exec(["env"], env={"EXTRA": "1"})).stdout.splitlines()}
    assert names == {b"PATH", b"HOME", b"LANG", b"TERM", b"EXTRA"}
    assert (await crate.exec("pwd")).stdout == b"/app\n"
    assert (await crate.exec("pwd", cwd="/no/such/place")).stdout == b"/\n"
    assert (await crate.exec(["no-such-program"])).exit_code == 127
    assert (await crate.exec("kill -TERM $$")).exit_code == 143


async def test_stdin_ends_and_is_empty_otherwise(crate: DockerSandbox) -> None:
    assert (await crate.exec("wc -c", stdin=b"x" * 3_000_000, timeout_s=PATIENCE_S)).stdout == b"3000000\n"
    assert (await crate.exec("wc -c", timeout_s=PATIENCE_S)).stdout == b"0\n"
    assert (await crate.exec("exit 4", stdin=b"x" * 3_000_000, timeout_s=PATIENCE_S)).exit_code == 4


async def test_a_script_longer_than_one_argument_may_be(crate: DockerSandbox) -> None:
    result = await crate.exec(f"x='{'é' * 200_000}'\necho ${{#x}}; exit 3", timeout_s=PATIENCE_S)
    assert (result.exit_code, result.stdout) == (3, b"200000\n")


async def test_fifty_megabytes_are_drained_and_cut_in_the_middle(crate: DockerSandbox) -> None:
    command = "echo quiet >&2; echo first; head -c 50M /dev/zero; echo; echo last"
    result = await crate.exec(command, max_output=1000, timeout_s=PATIENCE_S)
    assert result.dropped_bytes == 6 + (50 << 20) + 1 + 5 - (1000 - 6)
    assert result.stdout.startswith(b"first\n") and result.stdout.endswith(b"\nlast\n")
    assert result.stderr == b"quiet\n"


async def test_a_background_job_does_not_hold_the_command(crate: DockerSandbox) -> None:
    result = await crate.exec("sleep 3000 & echo started", timeout_s=PATIENCE_S)
    assert (result.exit_code, result.stdout, result.streams_open) == (0, b"started\n", True)
    assert b"sleep 3000" in (await crate.exec("ps -eo args")).stdout


async def test_a_command_that_closes_its_streams_is_waited_for(crate: DockerSandbox) -> None:
    result = await crate.exec("exec >&- 2>&-; sleep 2; exit 5", timeout_s=PATIENCE_S)
    assert result.exit_code == 5


async def test_concurrent_commands_get_their_own_answers(crate: DockerSandbox) -> None:
    results = await asyncio.gather(*(crate.exec(f"echo {n}; exit {n}", timeout_s=PATIENCE_S) for n in range(6)))
    assert [(result.exit_code, result.stdout) for result in results] == [(n, b"%d\n" % n) for n in range(6)]


async def test_timeout_kills_grandchildren_and_spares_older_jobs(crate: DockerSandbox) -> None:
    await crate.exec("(while :; do sleep 3001; done) >/dev/null 2>&1 &", timeout_s=PATIENCE_S)
    escapees = "setsid -f sleep 1001; (setsid sh -c \"trap '' TERM HUP; sleep 1002\" &); exec -a 'x) Z 1' sleep 1003"
    result = await crate.exec(f"echo before; {escapees}", timeout_s=5)
    assert (result.exit_code, result.timed_out, result.stdout) == (None, True, b"before\n")
    left = (await crate.exec("ps -eo args", timeout_s=PATIENCE_S)).stdout
    assert b"sleep 100" not in left
    assert b"sleep 3001" in left


async def test_a_cancelled_exec_takes_its_command_with_it(crate: DockerSandbox) -> None:
    task = asyncio.ensure_future(crate.exec("touch /tmp/runs; sleep 1004", timeout_s=PATIENCE_S))
    await crate.exec("until [ -e /tmp/runs ]; do sleep 0.1; done", timeout_s=PATIENCE_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gone = await crate.exec("while pgrep -f 'sleep 100[4]'; do sleep 0.1; done", timeout_s=PATIENCE_S)
    assert gone.exit_code == 0


# ---- limits and hostility


async def test_probe_names_what_the_engine_does_not_enforce(engine: DockerBackend) -> None:
    found = await engine.probe()
    assert {"memory", "pids", "cpu", "network"} <= found.enforced
    assert found.enforced | found.missing.keys() == {"memory", "pids", "cpu", "disk", "inodes", "network"}
    assert all("; " in why for why in found.missing.values())  # what was seen; the mend


async def test_a_limit_that_is_not_enforced_is_refused_unless_accepted(config: SandboxConfig, plain: Image) -> None:
    strict = DockerBackend(replace(config, accept_missing=()))
    try:
        with pytest.raises(SandboxError, match="sandbox.accept_missing"):
            await strict.create(plain)
    finally:
        await strict.close()


async def test_out_of_memory_is_told_and_the_sandbox_lives(crate: DockerSandbox) -> None:
    result = await crate.exec("head -c 300m /dev/zero | tail -c 300m | wc -c; echo after", timeout_s=PATIENCE_S)
    assert result.oom and result.stdout.endswith(b"after\n")
    assert not (await crate.exec("true", timeout_s=PATIENCE_S)).oom


@pytest.mark.parametrize("bomb", [":(){ :|:& };:; wait", "(:(){ :|:& };:) >/dev/null 2>&1 &"])
async def test_a_fork_bomb_is_gone_for_the_next_command(crate: DockerSandbox, bomb: str) -> None:
    await crate.exec(bomb, timeout_s=10)
    left = await crate.exec("ls -d /proc/[0-9]* | wc -l", timeout_s=PATIENCE_S)
    assert left.exit_code == 0 and int(left.stdout) < 10


async def test_signals_from_inside_leave_pid_1_alone(crate: DockerSandbox) -> None:
    await crate.exec("for n in {1..9} {11..64}; do kill -$n 1; done; kill -10 1; kill -9 -1", timeout_s=PATIENCE_S)
    status = await crate.exec("grep SigIgn /proc/1/status", timeout_s=PATIENCE_S)
    # Stopped twice: the kernel spares a PID 1 without a handler. So this layer is looked at: all of 1 to 31 but KILL,
    # USR1, CHLD and STOP.
    assert int(status.stdout.split()[1], 16) & 0x7FFFFFFF == 0x7FFAFCFF


async def test_orphans_are_reaped(crate: DockerSandbox) -> None:
    await crate.exec("for n in {1..40}; do (sleep 0.1 &); done; sleep 1", timeout_s=PATIENCE_S)
    assert b"defunct" not in (await crate.exec("ps -eo args", timeout_s=PATIENCE_S)).stdout


async def test_mounts_devices_and_kernel_settings_are_refused(crate: DockerSandbox) -> None:
    attempts = (
        "mount -t tmpfs x /mnt",
        "unshare -r true",
        "unshare -m true",
        "mknod /tmp/b b 254 0",
        "echo 1 >/proc/sys/kernel/core_pattern",
        "echo b >/proc/sysrq-trigger",
        "dmesg",
    )
    there = await crate.exec("command -v mount unshare mknod dmesg | wc -l", timeout_s=PATIENCE_S)
    assert there.stdout == b"4\n"  # an attack without its tool would be stopped for the wrong reason
    script = "; ".join(f"({attempt}) 2>/dev/null && echo 'through: {attempt}'" for attempt in attempts)
    assert (await crate.exec(script, timeout_s=PATIENCE_S)).stdout == b""
    links = await crate.exec("cut -d: -f1 -s /proc/net/dev; grep NoNewPrivs /proc/self/status", timeout_s=PATIENCE_S)
    assert [line.split() for line in links.stdout.splitlines() if b"|" not in line] == [[b"lo"], [b"NoNewPrivs:", b"1"]]


async def test_one_file_beyond_the_disk_limit_is_refused_even_without_a_quota(crate: DockerSandbox) -> None:
    result = await crate.exec("fallocate -l 3G /tmp/big; stat -c %s /tmp/big", timeout_s=PATIENCE_S)
    assert int(result.stdout or b"0") <= 64 << 20


# ---- files


async def test_files_go_in_and_come_out_and_links_stay_links(crate: DockerSandbox) -> None:
    files: dict[str, bytes | Entry] = {
        "a/größe 🙂": b"hi",
        "run": b"#!/bin/sh\n",
        "link": Entry("link", 0o777, target="/etc/shadow"),
        "d": Entry("dir", 0o700),
        "long/" + "x" * 120 + "/" + "y" * 120: b"z" * 100_000,
    }
    await crate.put("/app", files)
    await crate.exec("mkfifo fifo; ln run hard; ln -s nowhere dangling", timeout_s=PATIENCE_S)
    found = await crate.get("/app")
    assert found["a/größe 🙂"] == Entry("file", 0o644, b"hi")
    assert found["run"] == found["hard"] == Entry("file", 0o755, b"#!/bin/sh\n")
    assert found["link"] == Entry("link", 0o777, target="/etc/shadow")
    assert found["d"] == Entry("dir", 0o700) and found["fifo"].kind == "other" and found["dangling"].kind == "link"
    assert found["long/" + "x" * 120 + "/" + "y" * 120].content == b"z" * 100_000
    assert await crate.get("/app/run") == {"run": Entry("file", 0o755, b"#!/bin/sh\n")}
    assert await crate.get("/app/link") == {"link": Entry("link", 0o777, target="/etc/shadow")}
    assert await crate.get("/no/such") == {}


async def test_put_replaces_what_stands_there_and_is_not_led_out(crate: DockerSandbox) -> None:
    await crate.exec("ln -s /etc/passwd a; mkdir -p b/c d; touch d/old; ln -s /opt up; ln -s d e", timeout_s=PATIENCE_S)
    files = {"a": b"new", "b": b"file", "up/rsi-planted": b"x", "d": Entry("dir", 0o700), "e": Entry("dir", 0o755)}
    await crate.put("/app", files)
    result = await crate.exec("cat a b /opt/rsi-planted; ls d e; head -c 4 /etc/passwd", timeout_s=PATIENCE_S)
    assert result.stdout == b"newfilexd:\nold\n\ne:\nold\nroot"
    assert not os.path.exists("/opt/rsi-planted")
    with pytest.raises(ValueError, match="below the directory"):
        await crate.put("/app", {"../escape": b"x"})


async def test_get_is_bounded(crate: DockerSandbox) -> None:
    await crate.exec("truncate -s 1T sparse || truncate -s 60M sparse", timeout_s=PATIENCE_S)
    with pytest.raises(SandboxError, match="more than|bytes"):
        await crate.get("/app", max_bytes=1000)
    assert (await crate.exec("echo alive", timeout_s=PATIENCE_S)).stdout == b"alive\n"


async def test_a_snapshot_forks_the_files_and_not_the_processes(engine: DockerBackend, crate: DockerSandbox) -> None:
    await crate.exec("echo kept >file; rm /etc/issue; sleep 3003 &", timeout_s=PATIENCE_S)
    fork = await engine.create(await crate.snapshot())
    try:
        result = await fork.exec("cat file; ls /etc/issue; pgrep -c sleep", timeout_s=PATIENCE_S)
        assert result.stdout == b"kept\n0\n"
    finally:
        await fork.close()
    assert (await crate.exec("pgrep -c sleep", timeout_s=PATIENCE_S)).stdout == b"1\n"


# ---- images


async def test_steps_are_run_copied_and_kept(engine: DockerBackend) -> None:
    salt = str(time.time_ns())
    steps = (
        Step(copy={"/app/run.sh": b"#!/bin/sh\necho ran >made\n"}),
        Step(run=f"./run.sh; echo $MODE {salt} >>made"),
        Step(copy={"/opt/late": b"late"}),
    )
    spec = ImageSpec(steps, env=(("MODE", "fast"),))
    image, again = await asyncio.gather(*(engine.build(spec, timeout_s=PATIENCE_S) for _ in range(2)))
    assert image == again
    sandbox = await engine.create(image)
    try:
        result = await sandbox.exec("cat made /opt/late; stat -c ' %a' run.sh", timeout_s=PATIENCE_S)
        assert result.stdout == f"ran\nfast {salt}\nlate 755\n".encode()
    finally:
        await sandbox.close()


async def test_a_failing_or_endless_step_is_the_authors_fault(engine: DockerBackend) -> None:
    with pytest.raises(BuildError, match="ended with 3"):
        await engine.build(ImageSpec((Step(run="echo why >&2; exit 3"),)), timeout_s=PATIENCE_S)
    with pytest.raises(BuildError, match="took more than 3 s"):
        await engine.build(ImageSpec((Step(run="sleep 1000"),)), timeout_s=3)
    with pytest.raises(BuildError, match="normalised absolute path"):
        await engine.build(ImageSpec((Step(copy={"relative": b""}),)))


async def test_a_dockerfile_is_built_on_a_mapped_base(config: SandboxConfig, engine: DockerBackend) -> None:
    base = engine.base
    mapped = DockerBackend(replace(config, docker=DockerConfig(images={"ubuntu:24.04": base})))
    text = (
        "ARG V=24.04\nFROM ubuntu:$V AS build\nRUN echo $((6*7)) >/made\n"
        "FROM ubuntu:24.04\nCOPY --from=build /made /made\nENV MODE=fast\nWORKDIR /work\nCOPY files/ .\nUSER nobody\n"
    )
    try:
        files: dict[str, bytes | Entry] = {"Dockerfile": text.encode(), "files/a": b"copied\n"}
        image = await mapped.build_dockerfile(files, timeout_s=PATIENCE_S)
        assert image.workdir == "/work" and dict(image.env)["MODE"] == "fast"
        sandbox = await mapped.create(image)
        result = await sandbox.exec("cat /made a; id -un; echo $MODE; pwd", timeout_s=PATIENCE_S)
        assert result.stdout == b"42\ncopied\nnobody\nfast\n/work\n"
        assert (await mapped.build_dockerfile(files)).layers == image.layers
    finally:
        await mapped.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FROM no-such-base:1\nRUN true\n", "sandbox.docker.images: {no-such-base:1: LOCAL-IMAGE}"),
        ("FROM BASE\nRUN echo why; exit 3\n", "why"),
        ("FROM BASE\nNONSENSE x\n", "NONSENSE"),
        ("FROM BASE\nVOLUME /data\n", "VOLUME /data"),
        ("RUN true\n", "no FROM"),
    ],
)
async def test_a_dockerfile_that_cannot_be_built_says_why(engine: DockerBackend, text: str, message: str) -> None:
    await engine.probe()
    with pytest.raises(BuildError) as caught:
        text = text.replace("BASE", engine.base)
        await engine.build_dockerfile({"Dockerfile": text.encode()}, timeout_s=PATIENCE_S)
    assert message.lower() in str(caught.value).lower()


async def test_a_build_that_takes_too_long_leaves_no_container(engine: DockerBackend) -> None:
    text = f"FROM {engine.base}\nRUN sleep 1005\n"
    with pytest.raises(BuildError, match="took more than 15 s"):
        await engine.build_dockerfile({"Dockerfile": text.encode()}, timeout_s=15)
    for _ in range(200):
        found = await engine.call(engine.api.containers, all=True)
        if not any("sleep 1005" in each["Command"] for each in found):
            return
        await asyncio.sleep(0.2)
    raise AssertionError("the build's container is still there")


async def test_a_ca_bundle_is_there_for_run_and_not_in_the_environment(
    config: SandboxConfig, engine: DockerBackend, tmp_path: Path
) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text("-----BEGIN CERTIFICATE-----\nours\n-----END CERTIFICATE-----\n")
    trusting = DockerBackend(replace(config, docker=DockerConfig(ca_bundle=str(bundle))))
    try:
        text = f'FROM {engine.base}\nRUN cp "$PIP_CERT" /seen\n'
        files: dict[str, bytes | Entry] = {"Dockerfile": text.encode(), ".dockerignore": b"*\n"}
        built = await trusting.build_dockerfile(files, timeout_s=PATIENCE_S)
        spec = await trusting.build(ImageSpec((Step(run='cp "$PIP_CERT" /seen'),)), timeout_s=PATIENCE_S)
        for image in (built, spec):
            sandbox = await trusting.create(image)
            result = await sandbox.exec('grep -c ours /seen; echo "[$PIP_CERT]"', timeout_s=PATIENCE_S)
            assert result.stdout == b"1\n[]\n"
    finally:
        await trusting.close()
    with pytest.raises(SandboxError, match="give a PEM file"):
        docker_images.read_ca_bundle(str(tmp_path / "none"))


# ---- ends


async def test_a_sandbox_killed_from_outside_raises(engine: DockerBackend, plain: Image) -> None:
    sandbox = await engine.create(plain)
    task = asyncio.ensure_future(sandbox.exec("touch /tmp/runs; sleep 1006", timeout_s=PATIENCE_S))
    await sandbox.exec("until [ -e /tmp/runs ]; do sleep 0.1; done", timeout_s=PATIENCE_S)
    await engine.call(engine.api.kill, sandbox.container)
    with pytest.raises(SandboxError, match="dead"):
        await task
    with pytest.raises(SandboxError, match="dead"):
        await sandbox.put("/app", {"a": b""})
    await asyncio.gather(sandbox.close(), sandbox.close())
    await sandbox.close()
    assert await containers(engine, sandbox.name) == []


async def test_a_life_ends(engine: DockerBackend, plain: Image) -> None:
    sandbox = await engine.create(plain, Limits(wall_s=2))
    with pytest.raises(SandboxError, match="wall_s=2"):
        await sandbox.exec("sleep 1007", timeout_s=PATIENCE_S)
    await sandbox.close()
    assert await containers(engine, sandbox.name) == []


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.1, 0.4])
async def test_a_cancelled_create_leaves_no_container(config: SandboxConfig, plain: Image, after_s: float) -> None:
    backend = DockerBackend(replace(config, max_alive=1))
    await backend.probe()
    task = asyncio.ensure_future(backend.create(plain))
    await asyncio.sleep(after_s)
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():  # an engine may be faster than the longest wait
        await task.result().close()
    sandbox = await backend.create(plain)  # the slot is free again
    assert await containers(backend, f"rsi-{backend.name}") == [sandbox.name]
    await backend.close()
    with pytest.raises(SandboxError, match="closed"):
        await backend.create(plain)


async def test_a_host_killed_by_sigkill_leaves_nothing_that_the_next_does_not_sweep(
    cache: str, config: SandboxConfig, engine: DockerBackend, crate: DockerSandbox
) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    host = subprocess.Popen([sys.executable, "-c", HOST, cache, config.rootfs], stdout=subprocess.PIPE, env=environment)
    assert host.stdout
    try:
        name = (await asyncio.to_thread(host.stdout.readline)).decode().strip()
        assert await containers(engine, name) == [name]
        await engine.sweep()
        assert await containers(engine, name) == [name]  # its host lives
    finally:
        host.send_signal(signal.SIGKILL)
        host.wait()
        host.stdout.close()
    swept = await asyncio.to_thread(subprocess.run, SWEEP, env=environment, capture_output=True, check=True)
    assert json.loads(swept.stdout) == {"swept": [name]}
    assert await containers(engine, name) == []
    tags = [tag for image in await engine.call(engine.api.images) for tag in image["RepoTags"] or []]
    assert not any(name in tag for tag in tags)
    assert (await crate.exec("echo alive", timeout_s=PATIENCE_S)).stdout == b"alive\n"


# ---- no engine


async def test_a_missing_engine_names_the_mend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    backend = build_backend(SandboxConfig(backend="docker", cache_dir=cache))
    with pytest.raises(SandboxError, match="scripts/docker_engine.sh start"):
        await backend.probe()
    await backend.close()


def test_a_missing_package_names_the_pip_line(cache: str) -> None:
    code = (
        "import asyncio, sys\n"
        "sys.modules['docker'] = None\n"  # what an interpreter without the package answers
        "from rsi.sandbox import SandboxConfig, build_backend\n"
        "asyncio.run(build_backend(SandboxConfig(backend='docker')).probe())"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "RSI_CACHE": cache}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert "SandboxError" in result.stderr and "pip install 'rsi[docker]'" in result.stderr


def test_an_engine_behind_tls_or_ssh_is_refused_with_the_mend() -> None:
    assert docker_wire.parse_address("unix:///run/docker.sock") == docker_wire.Address(path="/run/docker.sock")
    assert docker_wire.parse_address("tcp://10.0.0.1:2375") == docker_wire.Address(host="10.0.0.1", port=2375)
    with pytest.raises(SandboxError, match="ssh -L"):
        docker_wire.parse_address("ssh://somebody@elsewhere")
