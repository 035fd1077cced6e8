"""A terminal with a screen, for agents that send keystrokes and read what a person would see; no tmux in the image.

Over `exec` alone, so every backend has it: util-linux's `script` (essential in Debian, there in most images) holds bash
on a pty inside, its keys come from a pipe there and what it prints goes to a log there, and the screen is emulated here
by pyte. The agent may forge its own log; nothing that is read here is ever a reward. A time-out of another command
takes the terminal along where there are no cgroups.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from rsi.sandbox import Sandbox, SandboxError

KEPT_BYTES = 100_000
"""Of what a step prints, the last that the screen is fed: pyte takes 0.1 to 0.3 MB/s."""
LOG_BYTES = 1 << 20
"""The log starts again beyond this: it lies on the sandbox's disk."""

# The fifo is opened to read and write, so that neither side waits for the other and no key ends the input.
START = """\
command -v script >/dev/null || { echo 'no script command in the image' >&2; exit 90; }
mkdir -p "$RSI_TTY" && mkfifo "$RSI_TTY/keys" || exit
own="-u RSI_TTY -u RSI_ROWS -u RSI_COLUMNS -u RSI_INSIDE"
export RSI_INSIDE="stty rows $RSI_ROWS cols $RSI_COLUMNS; : >'$RSI_TTY/ready'; exec env $own bash"
setsid -f bash -c 'echo $$ >"$RSI_TTY/pid"; exec script -qfc "$RSI_INSIDE" /dev/null' \
    <>"$RSI_TTY/keys" >>"$RSI_TTY/log" 2>&1
until [ -e "$RSI_TTY/ready" ]; do sleep 0.01; done
"""
# Keys in, then until nothing more was printed for a while; the answer's first line is where the log ends.
STEP = """\
[ -d "/proc/$(<"$RSI_TTY/pid")" ] || exit 91
cat 1<>"$RSI_TTY/keys"
last=-1; now=$(stat -c %s "$RSI_TTY/log"); waited=0
while [ "$now" != "$last" ] && [ "$waited" -lt "$RSI_ROUNDS" ]; do
    sleep "$RSI_QUIET_S"; last=$now; now=$(stat -c %s "$RSI_TTY/log"); waited=$((waited + 1))
done
echo "$now"
[ "$now" -lt "$RSI_OFFSET" ] && RSI_OFFSET=0
[ $((now - RSI_OFFSET)) -gt "$RSI_KEPT" ] && RSI_OFFSET=$((now - RSI_KEPT))
tail -c +$((RSI_OFFSET + 1)) "$RSI_TTY/log" | head -c $((now - RSI_OFFSET))
[ "$now" -gt "$RSI_LOG" ] && : >"$RSI_TTY/log"
:
"""


class Terminal:
    """bash on a pty in a sandbox, and its screen. Made by `open_terminal`; ends with the sandbox."""

    def __init__(self, sandbox: Sandbox, folder: str, screen: Any, stream: Any) -> None:
        self._sandbox, self._folder = sandbox, folder
        self._screen, self._stream = screen, stream
        self._offset = 0

    async def send(self, keys: bytes, quiet_s: float = 0.1, timeout_s: float = 5.0) -> str:
        """Type `keys` (`\\r` is Enter, `\\x03` is ^C) and return the screen once nothing was printed for `quiet_s`, or
        after `timeout_s`. Raises SandboxError where the terminal or its sandbox has ended."""
        variables = {
            "RSI_TTY": self._folder,
            "RSI_QUIET_S": f"{quiet_s:g}",
            "RSI_ROUNDS": str(max(1, round(timeout_s / quiet_s))),
            "RSI_OFFSET": str(self._offset),
            "RSI_KEPT": str(KEPT_BYTES),
            "RSI_LOG": str(LOG_BYTES),
        }
        done = await self._sandbox.exec(
            STEP, env=variables, stdin=keys, timeout_s=timeout_s + 30.0, max_output=2 * KEPT_BYTES
        )
        if done.exit_code != 0:
            reason = "its shell has ended" if done.exit_code == 91 else f"it did not answer {done.stderr!r}"
            raise SandboxError(f"the terminal cannot be used: {reason}; open another")
        end, _, printed = done.stdout.partition(b"\n")
        self._offset = 0 if int(end) > LOG_BYTES else int(end)
        self._stream.feed(printed)
        return self.screen()

    def screen(self) -> str:
        """What it shows, without blanks at the ends of lines and blank lines at the end."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip()


async def open_terminal(
    sandbox: Sandbox,
    *,
    rows: int = 40,
    columns: int = 160,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    folder: str = "/tmp/.rsi-terminal",
) -> Terminal:
    """Start bash on a pty of `rows` by `columns`. folder: inside the sandbox, one for each terminal.

    Raises SandboxError where the image has no `script`, ValueError where pyte is not installed.
    """
    try:
        import pyte
    except ImportError as error:
        raise ValueError("terminals need pyte: pip install 'rsi[terminal]'") from error
    variables = {"TERM": "xterm-256color", "RSI_TTY": folder, "RSI_ROWS": str(rows), "RSI_COLUMNS": str(columns)}
    done = await sandbox.exec(START, cwd=cwd, env={**(env or {}), **variables})
    if done.exit_code != 0:
        reason = done.stderr.decode(errors="replace").strip()
        raise SandboxError(
            f"cannot open a terminal in {shlex.quote(folder)}: {reason}; install util-linux in the image"
        )
    screen = pyte.Screen(columns, rows)
    return Terminal(sandbox, folder, screen, pyte.ByteStream(screen))
