"""A one-shot bash whose state lives on: each command runs in a fresh bash that first takes over cwd, exported
variables, functions and aliases of the one before, from a file in the sandbox.

No terminal and no sentinel in the output that a command could forge. Lost between commands: unexported variables, shell
options, jobs, and the state of a command that ended by SIGKILL, by `exec` or under an EXIT trap of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from rsi.sandbox import ExecResult, Sandbox

INLINE_BYTES = 100 << 10
"""The kernel takes 128 KiB in one environment string."""

STATE = "/run/rsi.state"
USER_STATE = "/tmp/.rsi.state"
"""Of an image's USER, who may not write to /run."""
SCRIPT = "/run/rsi.command"

# Builtins only, no fork. `unset` matters: the variable is exported, would be saved, and the first command replayed for
# ever.
WRAPPER = f"""\
shopt -s expand_aliases
[ -w /run ] && __rsi_state={STATE} || __rsi_state={USER_STATE}
[ -r $__rsi_state ] && . $__rsi_state 2>/dev/null
if [ -n "${{RSI_SCRIPT-}}" ]; then __rsi_command=$(<"$RSI_SCRIPT"); else __rsi_command=$RSI_COMMAND; fi
unset RSI_COMMAND RSI_SCRIPT
trap '__rsi_code=$?; {{ export -p; declare -f; alias -p; echo "cd -- ${{PWD@Q}}"; }} >$__rsi_state 2>/dev/null
exit $__rsi_code' EXIT
eval "$__rsi_command"
"""


async def shell(
    sandbox: Sandbox,
    command: str,
    *,
    timeout_s: float = 30.0,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    max_output: int = 10_000,
) -> ExecResult:
    """Run `command` where the last one left off; `cwd` and `env` are for the first one, later ones keep theirs.

    Raises SandboxError where the sandbox is dead, as `exec` does.
    """
    encoded = command.encode("utf-8", "surrogateescape")
    variables = {"RSI_COMMAND": command}
    if len(encoded) > INLINE_BYTES:
        folder, _, name = SCRIPT.rpartition("/")
        await sandbox.put(folder, {name: encoded})
        variables = {"RSI_SCRIPT": SCRIPT}
    return await sandbox.exec(
        ["bash", "--norc", "--noprofile", "-c", WRAPPER],
        timeout_s=timeout_s,
        cwd=cwd,
        env={**(env or {}), **variables},
        max_output=max_output,
    )
