"""The system calls that a container is denied: the `namespace` backend's filter, as a profile that an engine reads.

An engine's default profile is its version's: those before 2023 let io_uring through. One list for both backends also
lets one attack suite judge both.
"""

from __future__ import annotations

import errno
import functools
import json
from typing import Any

from rsi.sandbox import zygote

NAMESPACES = zygote.NEWNS | zygote.NEWCGROUP | zygote.NEWUTS | zygote.NEWIPC
NAMESPACES |= zygote.NEWUSER | zygote.NEWPID | zygote.NEWNET


@functools.cache
def profile() -> str:
    """JSON of https://docs.docker.com/engine/security/seccomp; the rules of `zygote.seccomp_program`, by name."""
    return json.dumps(
        {
            "defaultAction": "SCMP_ACT_ALLOW",
            "architectures": [{"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}[zygote.MACHINE]],
            "syscalls": [
                _deny(*sorted(zygote.DENY)),
                _deny("clone3", code=errno.ENOSYS),
                # SCMP_CMP_MASKED_EQ compares with one value, so each flag has a rule.
                *(_deny("clone", argument=_masked(0, flag)) for flag in _bits(NAMESPACES)),
                _deny("ioctl", argument={"index": 1, "value": zygote.TIOCSTI, "op": "SCMP_CMP_EQ"}),
            ],
        }
    )


def _deny(*names: str, code: int = errno.EPERM, argument: dict[str, Any] | None = None) -> dict[str, Any]:
    rule: dict[str, Any] = {"names": list(names), "action": "SCMP_ACT_ERRNO", "errnoRet": code}
    return rule | ({"args": [argument]} if argument else {})


def _masked(index: int, flag: int) -> dict[str, Any]:
    return {"index": index, "value": flag, "valueTwo": flag, "op": "SCMP_CMP_MASKED_EQ"}


def _bits(flags: int) -> list[int]:
    return [1 << bit for bit in range(flags.bit_length()) if flags & 1 << bit]
