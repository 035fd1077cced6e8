"""A pty with a screen, over `exec` alone."""

from __future__ import annotations

import pytest

from rsi.sandbox import Sandbox, SandboxError
from rsi.sandbox.terminal import Terminal, open_terminal


async def prompt(sandbox: Sandbox, rows: int, columns: int = 40) -> Terminal:
    terminal = await open_terminal(sandbox, rows=rows, columns=columns)
    await shows(terminal, b"PS1='$ '; export LESS=; clear\r", "$")
    return terminal


async def shows(terminal: Terminal, keys: bytes, expected: str) -> None:
    """The screen is `expected` after these keys; a busy machine may take longer than the silence that `send` awaits."""
    shown = await terminal.send(keys)
    for _ in range(100):
        if shown == expected:
            return
        shown = await terminal.send(b"")
    assert shown == expected


async def test_keys_go_in_and_the_screen_comes_back(any_box: Sandbox) -> None:
    terminal = await prompt(any_box, rows=10)
    typed = "echo hello; tty; stty size; pwd"
    await shows(terminal, typed.encode() + b"\r", f"$ {typed}\nhello\n/dev/pts/0\n10 40\n/app\n$")


async def test_the_screen_is_emulated_and_old_lines_scroll_off(any_box: Sandbox) -> None:
    terminal = await prompt(any_box, rows=5)
    await shows(terminal, b"seq 100\r", "97\n98\n99\n100\n$")
    await shows(terminal, b"clear; printf 'abc\\rX\\n\\033[3;5Hthere\\033[1;31m!\\033[0m\\n'\r", "Xbc\n\n    there!\n$")
    await shows(terminal, "clear; echo größe 日本\r".encode(), "größe 日本\n$")


async def test_full_screen_programs_and_interrupts_work(any_box: Sandbox) -> None:
    terminal = await prompt(any_box, rows=6)
    await shows(terminal, b"clear; seq 50 | less\r", "1\n2\n3\n4\n5\n:")
    await shows(terminal, b"G", "46\n47\n48\n49\n50\n(END)")
    await shows(terminal, b"qclear; cat\r", "")
    await shows(terminal, b"typed\r", "typed\ntyped")
    await shows(terminal, b"\x03", "typed\ntyped\n^C\n$")


async def test_a_flood_is_cut_and_the_end_is_shown(any_box: Sandbox) -> None:
    terminal = await prompt(any_box, rows=4)
    await shows(terminal, b"seq 200000\r", "199998\n199999\n200000\n$")
    await shows(terminal, b"clear\r", "$")  # the log began anew


async def test_a_shell_that_ended_says_so(any_box: Sandbox) -> None:
    terminal = await prompt(any_box, rows=4)
    with pytest.raises(SandboxError, match="its shell has ended; open another"):
        for _ in range(50):
            await terminal.send(b"exit\r")
