"""What every sandbox backend promises: commands, streams, time-outs, files, images, ends.

One suite over the Protocol, run against each backend (`any_box`), as root and as a plain user. What only one backend
promises stands in its own file.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shlex
import signal

import pytest

from rsi.sandbox import Backend, BuildError, Entry, Image, ImageSpec, Limits, Sandbox, SandboxError, Step
from rsi.sandbox.docker_container import DockerSandbox

pytestmark = pytest.mark.conformance

# ---- commands


async def test_exit_code_and_streams_stay_apart(any_box: Sandbox) -> None:
    result = await any_box.exec("echo out; echo err >&2; exit 7")
    assert (result.exit_code, result.stdout, result.stderr) == (7, b"out\n", b"err\n")
    assert not (result.timed_out or result.oom or result.streams_open or result.dropped_bytes)


async def test_a_signal_is_128_plus_its_number(any_box: Sandbox) -> None:
    assert (await any_box.exec("kill -TERM $$")).exit_code == 143


async def test_a_list_is_argv_and_is_not_expanded(any_box: Sandbox) -> None:
    assert (await any_box.exec(["echo", "$HOME", "a b"])).stdout == b"$HOME a b\n"


async def test_a_missing_program_is_127_and_one_that_may_not_run_126(any_box: Sandbox) -> None:
    assert (await any_box.exec(["no-such-program"])).exit_code == 127
    assert (await any_box.exec(["/etc/passwd"])).exit_code == 126


async def test_cwd_is_the_workdir_unless_given(any_box: Sandbox) -> None:
    assert (await any_box.exec("pwd")).stdout == b"/app\n"
    assert (await any_box.exec("pwd", cwd="/tmp")).stdout == b"/tmp\n"


async def test_the_environment_is_the_images_plus_what_is_given(any_box: Sandbox) -> None:
    names = {line.split(b"=")[0] for line in (await any_box.exec(["env"], env={"EXTRA": "1"})).stdout.splitlines()}
    assert names - {b"HOSTNAME"} == {b"PATH", b"HOME", b"LANG", b"TERM", b"EXTRA"}


async def test_a_command_runs_as_the_user_that_is_named(any_box: Sandbox) -> None:
    if os.geteuid() != 0:
        pytest.skip("a plain user's sandbox has one id")
    for user, name in (("nobody", b"nobody\n"), ("65534", b"nobody\n"), ("root", b"root\n"), (None, b"root\n")):
        assert (await any_box.exec("id -un", user=user)).stdout == name
    assert (await any_box.exec("touch /app/x", user="nobody")).exit_code == 1
    assert not await _runs_as(any_box, "no-such-user")


async def _runs_as(box: Sandbox, user: str) -> bool:
    """An engine refuses to start the command, our launcher's command ends with 126."""
    try:
        return (await box.exec("true", user=user)).exit_code == 0
    except SandboxError:
        return False


async def test_stdin_reaches_the_command_and_is_empty_otherwise(any_box: Sandbox) -> None:
    assert (await any_box.exec("wc -c", stdin=b"x" * 300_000)).stdout == b"300000\n"
    assert (await any_box.exec("wc -c")).stdout == b"0\n"


async def test_unicode_goes_through(any_box: Sandbox) -> None:
    assert (await any_box.exec("echo 'größe 🙂'; printf '\\377'")).stdout == "größe 🙂\n".encode() + b"\xff"


async def test_a_script_longer_than_one_argument_may_be(any_box: Sandbox) -> None:
    script = f"x='{'é' * 200_000}'\necho ${{#x}}; exit 3"
    result = await any_box.exec(script)
    assert (result.exit_code, result.stdout) == (3, b"200000\n")


async def test_many_long_arguments_go_through(any_box: Sandbox) -> None:
    result = await any_box.exec(["bash", "-c", "echo $#", "name", *["y" * 100_000] * 5])
    assert result.stdout == b"5\n"


async def test_heredocs_are_scripts_of_several_lines(any_box: Sandbox) -> None:
    quoted = "cat >f <<'EOF'\n$HOME `x` \\n\nEOF\nwhile read -r line; do\n  echo \"[$line]\"\ndone <f\n"
    script = quoted + "cat <<EOF\n$HOME\nEOF\n"
    assert (await any_box.exec(script)).stdout == b"[$HOME `x` \\n]\n/root\n"


async def test_a_pager_without_a_terminal_prints_and_ends(any_box: Sandbox) -> None:
    result = await any_box.exec("seq 1000 | ${PAGER:-less} | tail -1; seq 1000 | more | tail -1", timeout_s=20)
    assert (result.exit_code, result.stdout) == (0, b"1000\n1000\n")


async def test_a_prompt_that_waits_for_input_sees_the_end_of_it(any_box: Sandbox) -> None:
    prompts = 'read -rp "Continue? [y/N] " answer; echo "$?:$answer"; python3 -c "input()"; cat; exec </dev/tty'
    result = await any_box.exec(prompts, timeout_s=20)
    assert not result.timed_out
    assert result.stdout == b"1:\n" and b"EOFError" in result.stderr and b"/dev/tty" in result.stderr


async def test_commands_run_concurrently(any_box: Sandbox) -> None:
    # Each waits for the other, so one at a time would never end.
    ping = any_box.exec("mkfifo /tmp/a /tmp/b; echo hello >/tmp/a; cat /tmp/b", timeout_s=20)
    pong = any_box.exec("until [ -p /tmp/b ]; do sleep 0.01; done; cat /tmp/a; echo back >/tmp/b", timeout_s=20)
    first, second = await asyncio.gather(ping, pong)
    assert (first.stdout, second.stdout) == (b"back\n", b"hello\n")


async def test_twenty_at_once_get_their_own_answers(any_box: Sandbox) -> None:
    results = await asyncio.gather(*(any_box.exec(f"echo {number}; exit {number}") for number in range(20)))
    assert [(result.exit_code, result.stdout) for result in results] == [(n, b"%d\n" % n) for n in range(20)]


# ---- output


async def test_fifty_megabytes_are_drained_and_cut_in_the_middle(any_box: Sandbox) -> None:
    result = await any_box.exec("echo first; head -c 50M /dev/zero; echo; echo last", max_output=1000)
    total = 6 + (50 << 20) + 1 + 5
    assert result.exit_code == 0
    assert result.dropped_bytes == total - 1000
    assert result.stdout.startswith(b"first\n") and result.stdout.endswith(b"\nlast\n")
    marker = b"\n[%d bytes cut]\n" % (total - 1000)
    assert marker in result.stdout
    assert len(result.stdout) == 1000 + len(marker)


async def test_a_gigabyte_is_counted_exactly_and_not_kept(any_box: Sandbox) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, the highest ever
    result = await any_box.exec("head -c 1G /dev/zero", timeout_s=300, max_output=100_000)
    assert result.exit_code == 0 and result.dropped_bytes == (1 << 30) - 100_000
    assert len(result.stdout) < 101_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


async def test_a_character_torn_across_chunks_comes_out_whole(any_box: Sandbox) -> None:
    halves = "printf '\\360\\237'; sleep 0.2; printf '\\231\\202'"  # of one emoji, in two writes
    assert (await any_box.exec(halves)).stdout.decode() == "\U0001f642"
    many = "é" * 200_000  # 400,001 bytes: the byte in front puts every boundary of 64 KiB inside a character
    result = await any_box.exec(["cat"], stdin=b"x" + many.encode(), max_output=1 << 20)
    assert result.stdout.decode() == "x" + many


async def test_a_loud_stream_leaves_the_other_whole(any_box: Sandbox) -> None:
    result = await any_box.exec("echo quiet >&2; seq 100000", max_output=200)
    assert result.stderr == b"quiet\n"
    assert result.stdout.startswith(b"1\n2\n") and result.stdout.endswith(b"99999\n100000\n")
    assert result.dropped_bytes == 588_895 - 194


async def test_a_background_job_does_not_hold_the_command(any_box: Sandbox) -> None:
    result = await any_box.exec("sleep 300 & echo started", timeout_s=20)
    assert (result.exit_code, result.stdout, result.streams_open, result.timed_out) == (0, b"started\n", True, False)
    assert b"sleep 300" in (await any_box.exec("ps -eo args")).stdout


async def test_a_background_writer_is_drained_and_lives_on(any_box: Sandbox) -> None:
    await any_box.exec("(while sleep 0.01; do head -c 20000 /dev/zero || exit; echo x >>/tmp/rounds; done) &")
    await any_box.exec("until [ $(wc -l </tmp/rounds) -gt 20 ]; do sleep 0.02; done", timeout_s=20)
    rounds = await any_box.exec("wc -l </tmp/rounds")  # 20 rounds are 400 kB, six times what a pipe holds
    assert int(rounds.stdout) > 20


# ---- time


async def test_timeout_kills_grandchildren(any_box: Sandbox) -> None:
    escapees = "setsid -f sleep 1001; (setsid sh -c \"trap '' TERM HUP; sleep 1002\" &); sleep 1003"
    result = await any_box.exec(f"echo before; {escapees}", timeout_s=0.5)
    assert (result.exit_code, result.timed_out, result.stdout) == (None, True, b"before\n")
    assert b"sleep 100" not in (await any_box.exec("ps -eo args")).stdout


async def test_a_cancelled_exec_takes_its_command_with_it(any_box: Sandbox) -> None:
    task = asyncio.ensure_future(any_box.exec("touch /tmp/runs; sleep 1004"))
    await any_box.exec("until [ -e /tmp/runs ]; do sleep 0.01; done", timeout_s=20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gone = await any_box.exec("while pgrep -f 'sleep 100[4]'; do sleep 0.01; done", timeout_s=20)
    assert not gone.timed_out


async def test_a_cancelled_put_or_get_leaves_a_sandbox_that_works(any_box: Sandbox) -> None:
    await any_box.put("/app", {"big": bytes(8 << 20)})
    for transfer in (any_box.get("/app"), any_box.put("/app", {"other": bytes(8 << 20)})):
        task = asyncio.ensure_future(transfer)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert len((await any_box.get("/app/big"))["big"].content) == 8 << 20


async def test_killing_everything_ends_the_command_and_not_the_sandbox(any_box: Sandbox) -> None:
    await any_box.exec("kill -9 -1")
    assert (await any_box.exec("echo lives")).stdout == b"lives\n"


async def test_kill_all_leaves_only_the_supervisor(any_box: Sandbox) -> None:
    await any_box.exec("for i in 1 2 3; do setsid sleep 1005 & done")
    await any_box.kill_all()
    left = (await any_box.exec("ps -eo args --no-headers")).stdout.splitlines()
    assert b"ps -eo args --no-headers" in left and b"sleep 1005" not in left


async def test_life_ends_at_wall_s(any_backend: Backend, any_image: Image) -> None:
    sandbox = await any_backend.create(any_image, Limits(wall_s=0.3))
    with pytest.raises(SandboxError, match="wall_s"):
        await sandbox.exec("sleep 60")
    with pytest.raises(SandboxError, match="wall_s"):
        await sandbox.exec("true")
    await sandbox.close()


# ---- files


async def test_files_come_back_as_they_went(any_box: Sandbox) -> None:
    files = {
        "plain.txt": Entry("file", 0o600, b"text\n"),
        "sub/deep/tool": Entry("file", 0o755, bytes(range(256)) * 40),
        "empty": Entry("file", 0o644, b""),
        "kept": Entry("dir", 0o700),
        "link": Entry("link", 0o777, target="/etc/passwd"),
        "dangling": Entry("link", 0o777, target="../nowhere"),
        "n" * 180 + "ä": Entry("file", 0o644, b"long name"),
    }
    await any_box.put("/data", files)
    got = await any_box.get("/data")
    assert {path: entry for path, entry in got.items() if path in files} == files
    assert set(got) - set(files) == {"sub", "sub/deep"}


async def test_unicode_and_awkward_paths_go_in_and_out(any_box: Sandbox) -> None:
    names = ["größe 🙂.txt", "two  spaces", "-rf", "quo'te\"", "new\nline", "日本/語"]
    await any_box.put("/app/ünï", {name: name.encode() for name in names})
    listed = await any_box.exec(["cat", *(f"/app/ünï/{name}" for name in names)])
    assert listed.stdout == "".join(names).encode()
    await any_box.exec("mkdir -p " + shlex.quote("/app/ünï/新") + "; printf x >'/app/ünï/新/é'")
    got = await any_box.get("/app/ünï")
    assert {path: entry.content for path, entry in got.items() if entry.kind == "file"} == {
        **{name: name.encode() for name in names},
        "新/é": b"x",
    }


async def test_bytes_that_begin_with_a_shebang_can_be_run(any_box: Sandbox) -> None:
    await any_box.put("/tests", {"test.sh": b"#!/bin/bash\necho ran\n", "data": b"x"})
    assert (await any_box.exec("/tests/test.sh; stat -c %a /tests/data")).stdout == b"ran\n644\n"


async def test_put_replaces_and_never_writes_through_a_link(any_box: Sandbox) -> None:
    await any_box.exec("mkdir /t; echo keep >/app/victim; ln -s /app/victim /t/a; mkdir -p /t/b/c")
    await any_box.put("/t", {"a": b"new", "b": b"file"})
    assert (await any_box.exec("cat /app/victim /t/a /t/b")).stdout == b"keep\nnewfile"


async def test_a_put_with_a_way_out_is_refused(any_box: Sandbox) -> None:
    for path in ("../x", "/x", "a/../../x"):
        with pytest.raises(ValueError, match="relative"):
            await any_box.put("/app", {path: b""})


async def test_get_of_one_file_and_of_nothing(any_box: Sandbox) -> None:
    await any_box.exec("echo 1 >/app/reward.txt")
    assert await any_box.get("/app/reward.txt") == {"reward.txt": Entry("file", 0o644, b"1\n")}
    assert await any_box.get("/app/missing") == {}


async def test_get_of_too_much_raises(any_box: Sandbox) -> None:
    await any_box.exec("head -c 5000 /dev/zero >/app/five")
    with pytest.raises(SandboxError, match="more than 4999 bytes"):
        await any_box.get("/app", max_bytes=4999)
    made = await any_box.exec(["truncate", "-s", "1T", "/app/sparse"])
    if isinstance(any_box, DockerSandbox):
        assert made.exit_code == 128 + signal.SIGXFSZ  # an engine's containers bound the size of one file
    else:
        with pytest.raises(SandboxError, match="more than"):
            await any_box.get("/app")
    assert (await any_box.exec("rm /app/sparse")).exit_code == 0


async def test_deep_nesting_ends_a_get_in_an_error_and_not_in_a_hang(any_box: Sandbox) -> None:
    await any_box.exec(["python3", "-c", "import os\nfor i in range(3000): os.mkdir('d'); os.chdir('d')"])
    if isinstance(any_box, DockerSandbox):
        assert len(await any_box.get("/app")) == 3000  # the engine's tar goes down all the way
    else:
        with pytest.raises(SandboxError):
            await any_box.get("/app")
    assert (await any_box.exec("echo ok")).stdout == b"ok\n"


async def test_a_full_disk_is_an_error_of_the_command_and_a_fault_of_a_put(
    any_backend: Backend, any_image: Image
) -> None:
    if why := (await any_backend.probe()).missing.get("disk"):
        pytest.skip(f"no disk is full here: {why}")
    sandbox = await any_backend.create(any_image, Limits(disk_mb=4))
    full = await sandbox.exec("head -c 10M /dev/zero >/app/big")
    assert full.exit_code == 1 and b"No space left" in full.stderr
    with pytest.raises(SandboxError, match="No space left"):
        await sandbox.put("/app", {"more": bytes(1 << 20)})
    assert (await sandbox.exec("echo ok")).stdout == b"ok\n"
    await sandbox.close()


async def test_get_passes_by_what_is_no_file(any_box: Sandbox) -> None:
    await any_box.exec("mkfifo /app/pipe; echo x >/app/x")
    got = await any_box.get("/app")
    assert (got["pipe"].kind, got["x"].content) == ("other", b"x\n")


# ---- images


async def test_copied_files_are_in_every_sandbox_of_an_image(any_backend: Backend) -> None:
    copied = {"/app/in.txt": b"input\n", "/usr/bin/tool": b"#!/bin/sh\necho tool\n"}
    image = await any_backend.build(ImageSpec((Step(copy=copied),), env=(("MODE", "quick"),), workdir="/app"))
    for _ in range(2):
        sandbox = await any_backend.create(image)
        result = await sandbox.exec("cat in.txt; tool; echo $MODE; rm -rf in.txt; mkdir in.txt")
        assert (result.exit_code, result.stdout) == (0, b"input\ntool\nquick\n")
        await sandbox.close()


async def test_equal_specs_asked_for_together_are_built_once(any_backend: Backend) -> None:
    spec = ImageSpec((Step(run="date +%N >/stamp"),))
    images = await asyncio.gather(*(any_backend.build(spec) for _ in range(5)))
    assert len(set(images)) == 1


async def test_a_failing_run_step_raises_with_its_output(any_backend: Backend) -> None:
    with pytest.raises(BuildError, match="no luck"):
        await any_backend.build(ImageSpec((Step(run="echo no luck >&2; exit 3"),)))
    with pytest.raises(BuildError, match="0.2 s"):
        await any_backend.build(ImageSpec((Step(run="sleep 100"),)), timeout_s=0.2)


async def test_a_snapshot_forks_files_and_not_processes(any_box: Sandbox, any_backend: Backend) -> None:
    await any_box.exec(
        "echo one >/app/f; mkdir -p /etc/alternatives.d; rm -rf /etc/terminfo /etc/security; mkdir /etc/security;"
        "install -m 000 /dev/null /app/closed; (while sleep 0.01; do date >/app/tick; done) &"
    )
    image = await any_box.snapshot()
    await any_box.exec("echo two >/app/f")
    fork = await any_backend.create(image)
    seen = await fork.exec(
        "cat f; ls /etc/security; ls -d /etc/terminfo; stat -c %a closed; ps -eo args | grep -c [d]ate"
    )
    assert seen.stdout == b"one\n0\n0\n"
    await fork.exec("echo three >/app/f")
    assert (await any_box.exec("cat /app/f")).stdout == b"two\n"
    await any_box.exec("rm /app/tick; until [ -e /app/tick ]; do sleep 0.02; done", timeout_s=20)  # it was thawed
    await fork.close()


# ---- between sandboxes


async def test_two_sandboxes_do_not_see_each_other(any_box: Sandbox, any_backend: Backend, any_image: Image) -> None:
    other = await any_backend.create(any_image)
    await other.exec("echo x >/app/theirs; echo x >/dev/shm/theirs; sleep 500 &")
    seen = await any_box.exec("ls /app /dev/shm; ps -eo args | grep '[s]leep 500'")
    assert seen.stdout == b"/app:\n\n/dev/shm:\n"
    await other.close()


async def test_its_own_loopback_works(any_box: Sandbox) -> None:
    code = "import socket as s; a = s.create_server(('127.0.0.1', 0)); s.create_connection(a.getsockname()); print(1)"
    assert (await any_box.exec(["python3", "-c", code])).stdout == b"1\n"


# ---- ends


async def test_close_twice_and_use_after_it(any_backend: Backend, any_image: Image) -> None:
    sandbox = await any_backend.create(any_image)
    await asyncio.gather(sandbox.close(), sandbox.close())
    await sandbox.close()
    with pytest.raises(SandboxError, match="closed|dead"):
        await sandbox.exec("true")


async def test_close_while_a_command_runs_is_a_fault_of_that_command(any_backend: Backend, any_image: Image) -> None:
    sandbox = await any_backend.create(any_image)
    task = asyncio.ensure_future(sandbox.exec("sleep 60"))
    await asyncio.sleep(0.1)
    await sandbox.close()
    with pytest.raises(SandboxError, match="closed|dead"):
        await task
