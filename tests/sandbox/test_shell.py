from __future__ import annotations

import pytest

from rsi.sandbox import ImageSpec
from rsi.sandbox.namespace import NamespaceBackend, NamespaceSandbox
from rsi.sandbox.shell import shell


async def test_directory_exports_functions_and_aliases_live_on(box: NamespaceSandbox) -> None:
    await shell(box, "mkdir d; cd d; export NAME=\"it's a\\nb\"; greet() { echo hi $1; }; alias ll='ls -la'")
    result = await shell(box, 'pwd; echo "$NAME"; greet you; alias ll')
    assert result.stdout == b"/app/d\nit's a\\nb\nhi you\nalias ll='ls -la'\n"


async def test_state_lives_on_for_an_images_user(backend: NamespaceBackend) -> None:
    if not backend.privileged:
        pytest.skip("a plain user's sandbox has one id")
    sandbox = await backend.create(await backend.build(ImageSpec(user="nobody")))
    await shell(sandbox, "cd /tmp; export NAME=kept")
    assert (await shell(sandbox, "pwd; echo $NAME; id -un")).stdout == b"/tmp\nkept\nnobody\n"
    await sandbox.close()


async def test_a_command_is_not_replayed(box: NamespaceSandbox) -> None:
    await shell(box, "echo once >>/tmp/log")
    await shell(box, "true")
    assert (await shell(box, "cat /tmp/log; env | grep RSI")).stdout == b"once\n"


async def test_exit_codes_and_state_survive_exit(box: NamespaceSandbox) -> None:
    assert (await shell(box, "cd /tmp; exit 7")).exit_code == 7
    assert (await shell(box, "pwd; false")).stdout == b"/tmp\n"
    assert (await shell(box, "false")).exit_code == 1


async def test_a_shell_killed_outright_keeps_the_state_before_it(box: NamespaceSandbox) -> None:
    await shell(box, "cd /tmp")
    assert (await shell(box, "cd /; kill -9 $$")).exit_code == 137
    assert (await shell(box, "pwd")).stdout == b"/tmp\n"


async def test_a_timeout_keeps_the_state_before_it(box: NamespaceSandbox) -> None:
    await shell(box, "cd /tmp")
    assert (await shell(box, "cd /; sleep 60", timeout_s=0.3)).timed_out
    assert (await shell(box, "pwd")).stdout == b"/tmp\n"


async def test_heredocs_and_many_lines(box: NamespaceSandbox) -> None:
    result = await shell(box, "cat >f <<'EOF'\n$HOME `x`\nEOF\nwhile read -r line; do\n  echo \"[$line]\"\ndone <f")
    assert result.stdout == b"[$HOME `x`]\n"


async def test_a_removed_directory_can_be_made_again(box: NamespaceSandbox) -> None:
    await shell(box, "rm -rf /app")
    assert (await shell(box, "mkdir /app && cd /app && pwd")).stdout == b"/app\n"


async def test_a_command_longer_than_an_environment_string(box: NamespaceSandbox) -> None:
    body = "\n".join(f"line {number} 'quoted' $HOME" for number in range(8000))
    result = await shell(box, f"cat >big <<'EOF'\n{body}\nEOF\nwc -l <big; export AFTER=1", cwd="/app")
    assert result.stdout == b"8000\n"
    assert (await shell(box, "echo $AFTER")).stdout == b"1\n"


async def test_a_syntax_error_is_the_commands_own(box: NamespaceSandbox) -> None:
    result = await shell(box, "if then")
    assert result.exit_code == 2 and b"syntax error" in result.stderr
    assert (await shell(box, "echo ok")).stdout == b"ok\n"
