"""What every backend promises: commands, streams, time-outs, files, images, ends. Run as root and as a plain user."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import pytest

from rsi.sandbox import BuildError, Entry, Image, ImageSpec, Limits, SandboxError, Step
from rsi.sandbox.namespace import NamespaceBackend, NamespaceSandbox

# ---- commands


async def test_exit_code_and_streams_stay_apart(box: NamespaceSandbox) -> None:
    result = await box.exec("echo out; echo err >&2; exit 7")
    assert (result.exit_code, result.stdout, result.stderr) == (7, b"out\n", b"err\n")
    assert not (result.timed_out or result.oom or result.streams_open or result.dropped_bytes)


async def test_a_signal_is_128_plus_its_number(box: NamespaceSandbox) -> None:
    assert (await box.exec("kill -TERM $$")).exit_code == 143


async def test_a_list_is_argv_and_is_not_expanded(box: NamespaceSandbox) -> None:
    assert (await box.exec(["echo", "$HOME", "a b"])).stdout == b"$HOME a b\n"


async def test_a_missing_program_is_127_and_one_that_may_not_run_126(box: NamespaceSandbox) -> None:
    assert (await box.exec(["no-such-program"])).exit_code == 127
    assert (await box.exec(["/etc/passwd"])).exit_code == 126


async def test_cwd_is_the_workdir_unless_given(box: NamespaceSandbox) -> None:
    assert (await box.exec("pwd")).stdout == b"/app\n"
    assert (await box.exec("pwd", cwd="/tmp")).stdout == b"/tmp\n"
    assert (await box.exec("pwd", cwd="/no/such/place")).stdout == b"/\n"


async def test_the_environment_is_the_images_plus_what_is_given(box: NamespaceSandbox) -> None:
    names = {line.split(b"=")[0] for line in (await box.exec(["env"], env={"EXTRA": "1"})).stdout.splitlines()}
    assert names == {b"PATH", b"HOME", b"LANG", b"TERM", b"EXTRA"}


async def test_stdin_reaches_the_command_and_is_empty_otherwise(box: NamespaceSandbox) -> None:
    assert (await box.exec("wc -c", stdin=b"x" * 300_000)).stdout == b"300000\n"
    assert (await box.exec("wc -c")).stdout == b"0\n"


async def test_unicode_goes_through(box: NamespaceSandbox) -> None:
    assert (await box.exec("echo 'größe 🙂'; printf '\\377'")).stdout == "größe 🙂\n".encode() + b"\xff"


async def test_a_script_longer_than_one_argument_may_be(box: NamespaceSandbox) -> None:
    script = f"x='{'é' * 200_000}'\necho ${{#x}}; exit 3"
    result = await box.exec(script)
    assert (result.exit_code, result.stdout) == (3, b"200000\n")


async def test_many_long_arguments_go_through(box: NamespaceSandbox) -> None:
    result = await box.exec(["bash", "-c", "echo $#", "name", *["y" * 100_000] * 5])
    assert result.stdout == b"5\n"


async def test_commands_run_concurrently(box: NamespaceSandbox) -> None:
    # Each waits for the other, so one at a time would never end.
    ping = box.exec("mkfifo /tmp/a /tmp/b; echo hello >/tmp/a; cat /tmp/b", timeout_s=20)
    pong = box.exec("until [ -p /tmp/b ]; do sleep 0.01; done; cat /tmp/a; echo back >/tmp/b", timeout_s=20)
    first, second = await asyncio.gather(ping, pong)
    assert (first.stdout, second.stdout) == (b"back\n", b"hello\n")


async def test_twenty_at_once_get_their_own_answers(box: NamespaceSandbox) -> None:
    results = await asyncio.gather(*(box.exec(f"echo {number}; exit {number}") for number in range(20)))
    assert [(result.exit_code, result.stdout) for result in results] == [(n, b"%d\n" % n) for n in range(20)]


# ---- output


async def test_fifty_megabytes_are_drained_and_cut_in_the_middle(box: NamespaceSandbox) -> None:
    result = await box.exec("echo first; head -c 50M /dev/zero; echo; echo last", max_output=1000)
    total = 6 + (50 << 20) + 1 + 5
    assert result.exit_code == 0
    assert result.dropped_bytes == total - 1000
    assert result.stdout.startswith(b"first\n") and result.stdout.endswith(b"\nlast\n")
    marker = b"\n[%d bytes cut]\n" % (total - 1000)
    assert marker in result.stdout
    assert len(result.stdout) == 1000 + len(marker)


async def test_a_loud_stream_leaves_the_other_whole(box: NamespaceSandbox) -> None:
    result = await box.exec("echo quiet >&2; seq 100000", max_output=200)
    assert result.stderr == b"quiet\n"
    assert result.stdout.startswith(b"1\n2\n") and result.stdout.endswith(b"99999\n100000\n")
    assert result.dropped_bytes == 588_895 - 194


async def test_a_background_job_does_not_hold_the_command(box: NamespaceSandbox) -> None:
    result = await box.exec("sleep 300 & echo started", timeout_s=20)
    assert (result.exit_code, result.stdout, result.streams_open, result.timed_out) == (0, b"started\n", True, False)
    assert b"sleep 300" in (await box.exec("ps -eo args")).stdout


async def test_a_background_writer_is_drained_and_lives_on(box: NamespaceSandbox) -> None:
    await box.exec("(while sleep 0.01; do head -c 20000 /dev/zero || exit; echo x >>/tmp/rounds; done) &")
    await box.exec("until [ $(wc -l </tmp/rounds) -gt 20 ]; do sleep 0.02; done", timeout_s=20)
    rounds = await box.exec("wc -l </tmp/rounds")  # 20 rounds are 400 kB, six times what a pipe holds
    assert int(rounds.stdout) > 20


# ---- time


async def test_timeout_kills_grandchildren(box: NamespaceSandbox) -> None:
    escapees = "setsid -f sleep 1001; (setsid sh -c \"trap '' TERM HUP; sleep 1002\" &); sleep 1003"
    result = await box.exec(f"echo before; {escapees}", timeout_s=0.5)
    assert (result.exit_code, result.timed_out, result.stdout) == (None, True, b"before\n")
    assert b"sleep 100" not in (await box.exec("ps -eo args")).stdout


async def test_timeout_spares_older_jobs_where_cgroups_tell_them_apart(
    box: NamespaceSandbox, has_cgroups: bool
) -> None:
    await box.exec("sleep 301 &")
    assert (await box.exec("sleep 302", timeout_s=0.3)).timed_out
    assert (b"sleep 301" in (await box.exec("ps -eo args")).stdout) == has_cgroups


async def test_a_cancelled_exec_takes_its_command_with_it(box: NamespaceSandbox) -> None:
    task = asyncio.ensure_future(box.exec("touch /tmp/runs; sleep 1004"))
    await box.exec("until [ -e /tmp/runs ]; do sleep 0.01; done", timeout_s=20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gone = await box.exec("while pgrep -f 'sleep 100[4]'; do sleep 0.01; done", timeout_s=20)
    assert not gone.timed_out


async def test_kill_all_leaves_only_the_supervisor(box: NamespaceSandbox) -> None:
    await box.exec("for i in 1 2 3; do setsid sleep 1005 & done")
    await box.kill_all()
    assert (await box.exec("ps -eo args --no-headers")).stdout.splitlines() == [b"sandbox", b"ps -eo args --no-headers"]


async def test_life_ends_at_wall_s(backend: NamespaceBackend, image: Image) -> None:
    sandbox = await backend.create(image, Limits(wall_s=0.3))
    with pytest.raises(SandboxError, match="wall_s=0.3"):
        await sandbox.exec("sleep 60")
    with pytest.raises(SandboxError, match="wall_s=0.3"):
        await sandbox.exec("true")
    await sandbox.close()


# ---- files


async def test_files_come_back_as_they_went(box: NamespaceSandbox) -> None:
    files = {
        "plain.txt": Entry("file", 0o600, b"text\n"),
        "sub/deep/tool": Entry("file", 0o755, bytes(range(256)) * 40),
        "empty": Entry("file", 0o644, b""),
        "kept": Entry("dir", 0o700),
        "link": Entry("link", 0o777, target="/etc/passwd"),
        "dangling": Entry("link", 0o777, target="../nowhere"),
        "n" * 180 + "ä": Entry("file", 0o644, b"long name"),
    }
    await box.put("/data", files)
    got = await box.get("/data")
    assert {path: entry for path, entry in got.items() if path in files} == files
    assert set(got) - set(files) == {"sub", "sub/deep"}


async def test_bytes_that_begin_with_a_shebang_can_be_run(box: NamespaceSandbox) -> None:
    await box.put("/tests", {"test.sh": b"#!/bin/bash\necho ran\n", "data": b"x"})
    assert (await box.exec("/tests/test.sh; stat -c %a /tests/data")).stdout == b"ran\n644\n"


async def test_put_replaces_and_never_writes_through_a_link(box: NamespaceSandbox) -> None:
    await box.exec("mkdir /t; echo keep >/app/victim; ln -s /app/victim /t/a; mkdir -p /t/b/c")
    await box.put("/t", {"a": b"new", "b": b"file"})
    assert (await box.exec("cat /app/victim /t/a /t/b")).stdout == b"keep\nnewfile"


async def test_a_put_with_a_way_out_is_refused(box: NamespaceSandbox) -> None:
    for path in ("../x", "/x", "a/../../x"):
        with pytest.raises(ValueError, match="relative"):
            await box.put("/app", {path: b""})


async def test_get_of_one_file_and_of_nothing(box: NamespaceSandbox) -> None:
    await box.exec("echo 1 >/app/reward.txt")
    assert await box.get("/app/reward.txt") == {"reward.txt": Entry("file", 0o644, b"1\n")}
    assert await box.get("/app/missing") == {}


async def test_get_of_too_much_raises(box: NamespaceSandbox) -> None:
    await box.exec("head -c 5000 /dev/zero >/app/five")
    with pytest.raises(SandboxError, match="more than 4999 bytes"):
        await box.get("/app", max_bytes=4999)
    await box.exec("truncate -s 1T /app/sparse")
    with pytest.raises(SandboxError, match="more than"):
        await box.get("/app")
    assert (await box.exec("rm /app/sparse")).exit_code == 0


async def test_get_passes_by_what_is_no_file(box: NamespaceSandbox) -> None:
    await box.exec("mkfifo /app/pipe; echo x >/app/x")
    got = await box.get("/app")
    assert (got["pipe"].kind, got["x"].content) == ("other", b"x\n")


# ---- images


async def test_copied_files_are_in_every_sandbox_of_an_image(backend: NamespaceBackend) -> None:
    copied = {"/app/in.txt": b"input\n", "/usr/bin/tool": b"#!/bin/sh\necho tool\n"}
    image = await backend.build(ImageSpec((Step(copy=copied),), env=(("MODE", "quick"),), workdir="/app"))
    for _ in range(2):
        sandbox = await backend.create(image)
        result = await sandbox.exec("cat in.txt; tool; echo $MODE; rm -rf in.txt; mkdir in.txt")
        assert (result.exit_code, result.stdout) == (0, b"input\ntool\nquick\n")
        await sandbox.close()


async def test_run_steps_see_what_came_before_and_are_cached(backend: NamespaceBackend) -> None:
    spec = ImageSpec(
        (
            Step(copy={"/app/n": b"1\n"}),
            Step(run="echo $(($(cat n) + 1)) >n; date +%N >stamp; rm /etc/shells"),
            Step(copy={"/app/late": b"late\n"}),
        )
    )
    stamps = []
    for owner in (backend, other := NamespaceBackend(backend.config)):
        sandbox = await owner.create(await owner.build(spec))
        assert (await sandbox.exec("cat n late; ls /etc/shells")).stdout == b"2\nlate\n"
        stamps.append((await sandbox.exec("cat stamp")).stdout)
        await sandbox.close()
    await other.close()
    assert stamps[0] == stamps[1]


async def test_equal_specs_asked_for_together_are_built_once(backend: NamespaceBackend) -> None:
    spec = ImageSpec((Step(run="date +%N >/stamp"),))
    images = await asyncio.gather(*(backend.build(spec) for _ in range(5)))
    assert len(set(images)) == 1


async def test_a_failing_run_step_raises_with_its_output(backend: NamespaceBackend) -> None:
    with pytest.raises(BuildError, match=r"(?s)ended with 3.*no luck"):
        await backend.build(ImageSpec((Step(run="echo no luck >&2; exit 3"),)))
    with pytest.raises(BuildError, match="more than 0.2 s"):
        await backend.build(ImageSpec((Step(run="sleep 100"),)), timeout_s=0.2)


async def test_a_large_copy_becomes_a_layer(backend: NamespaceBackend) -> None:
    image = await backend.build(ImageSpec((Step(copy={"/app/big": b"b" * (2 << 20)}),)))
    assert [os.path.isdir(layer) for layer in image.layers] == [True]
    sandbox = await backend.create(image)
    assert (await sandbox.exec("wc -c <big")).stdout == b"2097152\n"
    await sandbox.close()


async def test_a_snapshot_forks_files_and_not_processes(box: NamespaceSandbox, backend: NamespaceBackend) -> None:
    await box.exec(
        "echo one >/app/f; mkdir -p /etc/alternatives.d; rm -rf /etc/terminfo /etc/security; mkdir /etc/security;"
        "install -m 000 /dev/null /app/closed; (while sleep 0.01; do date >/app/tick; done) &"
    )
    image = await box.snapshot()
    await box.exec("echo two >/app/f")
    fork = await backend.create(image)
    seen = await fork.exec(
        "cat f; ls /etc/security; ls -d /etc/terminfo; stat -c %a closed; ps -eo args | grep -c [d]ate"
    )
    assert seen.stdout == b"one\n0\n0\n"
    await fork.exec("echo three >/app/f")
    assert (await box.exec("cat /app/f")).stdout == b"two\n"
    await box.exec("rm /app/tick; until [ -e /app/tick ]; do sleep 0.02; done", timeout_s=20)  # it was thawed
    await fork.close()


# ---- ends


async def test_close_twice_and_use_after_it(backend: NamespaceBackend, image: Image) -> None:
    sandbox = await backend.create(image)
    await asyncio.gather(sandbox.close(), sandbox.close())
    await sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        await sandbox.exec("true")


async def test_close_while_a_command_runs_is_a_fault_of_that_command(backend: NamespaceBackend, image: Image) -> None:
    sandbox = await backend.create(image)
    task = asyncio.ensure_future(sandbox.exec("sleep 60"))
    await asyncio.sleep(0.1)
    await sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        await task


async def test_more_sandboxes_than_may_be_alive_wait(backend: NamespaceBackend) -> None:
    backend = NamespaceBackend(replace(backend.config, max_alive=2))
    image = await backend.build(ImageSpec())
    alive = 0
    peak = 0

    async def one() -> None:
        nonlocal alive, peak
        sandbox = await backend.create(image)
        alive += 1
        peak = max(peak, alive)
        await sandbox.exec("sleep 0.05")
        alive -= 1
        await sandbox.close()

    await asyncio.gather(*(one() for _ in range(6)))
    await backend.close()
    assert peak == 2


async def test_descriptors_do_not_leak(backend: NamespaceBackend, image: Image) -> None:
    async def one() -> None:
        sandbox = await backend.create(image)
        await sandbox.exec("sleep 100 & echo x", stdin=b"y")
        await sandbox.put("/app", {"a": b"b"})
        await sandbox.get("/app")
        await sandbox.close()

    await one()
    before = len(os.listdir("/proc/self/fd"))
    await asyncio.gather(*(one() for _ in range(4)))
    assert len(os.listdir("/proc/self/fd")) == before


async def test_the_base_holds_what_tasks_use(box: NamespaceSandbox) -> None:
    tools = "bash awk sed grep find tar gzip diff xargs ps setsid column python3 sort tr"
    missing = await box.exec(f"for t in {tools}; do command -v $t >/dev/null || echo $t; done")
    assert missing.stdout == b""


async def test_python_runs_pytest_inside(box: NamespaceSandbox) -> None:
    await box.put("/tests", {"test_x.py": b"def test_good(): pass\ndef test_bad(): assert 1 == 2\n"})
    result = await box.exec("python3 -B -m pytest -q -p no:cacheprovider /tests/test_x.py", env={"LC_ALL": "C.UTF-8"})
    assert b"1 failed, 1 passed" in result.stdout, result
