"""What the `docker` backend makes images from: our own base as a tar, and Dockerfiles whose FROM is mapped by config.

No registry is needed: the base is the one of the `namespace` backend, imported; a Dockerfile's FROM is looked up in
`sandbox.docker.images` and rewritten, rather than tagged in the engine, whose own `ubuntu:24.04` may be another.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass

from rsi.sandbox import BuildError, SandboxError, zygote

CA_FILE = ".rsi-ca.crt"
CA_TARGET = "/etc/ssl/certs/ca-certificates.crt"
CA_VARIABLES = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")
FROM = re.compile(r"^(\s*FROM\s+(?:--platform=\S+\s+)?)(\S+)((?:\s+AS\s+(\S+))?\s*)$", re.IGNORECASE)
ARG = re.compile(r"^\s*ARG\s+(\w+)=(\S*)\s*$", re.IGNORECASE)


def write_base(base: str, target: str) -> None:
    """A tar of the directory `base` at `target`, its ids shifted back to those that a container sees. Seconds."""

    def owner(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        shifted = member.uid >= zygote.UID_BASE
        member.uid = member.uid - zygote.UID_BASE if shifted else 0
        member.gid = member.gid - zygote.UID_BASE if shifted and member.gid >= zygote.UID_BASE else 0
        member.uname = member.gname = ""
        return None if member.ischr() or member.isblk() else member

    with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as archive:
        for name in sorted(os.listdir(base)):
            archive.add(f"{base}/{name}", arcname=name, filter=owner)


@dataclass(frozen=True)
class Dockerfile:
    """A Dockerfile as the engine gets it, and the images that it begins with."""

    text: str
    bases: tuple[tuple[str, str], ...]
    """(name in FROM, image that it stands for)."""


def map_bases(text: str, images: Mapping[str, str], with_ca: bool) -> Dockerfile:
    """Rewrite every FROM by `images`; with_ca: copy the CA bundle in right after it, trusted by what RUN starts.

    Raises BuildError where there is no FROM.
    """
    lines: list[str] = []
    stages: set[str] = set()
    arguments: dict[str, str] = {}
    bases: list[tuple[str, str]] = []
    for line in text.splitlines():
        if not bases and (default := ARG.match(line)):
            arguments[default[1]] = default[2].strip("\"'")
        found = FROM.match(line)
        if not found:
            lines.append(line)
            continue
        name = re.sub(r"\$\{?(\w+)\}?", lambda variable: arguments.get(variable[1], variable[0]), found[2])
        if name.lower() != "scratch" and name.lower() not in stages:
            name = images.get(name, name)
            bases.append((found[2], name))
        lines.append(f"{found[1]}{name}{found[3]}")
        if found[4]:
            stages.add(found[4].lower())
        if with_ca and name.lower() != "scratch":
            # ARG, not ENV: for the RUN lines of this build, and not in the environment of the image.
            lines += [f"COPY {CA_FILE} {CA_TARGET}", *(f"ARG {variable}={CA_TARGET}" for variable in CA_VARIABLES)]
    if not bases:
        raise BuildError("the Dockerfile has no FROM with an image; its first line is FROM NAME")
    return Dockerfile("\n".join(lines) + "\n", tuple(bases))


def missing_base(asked: str, name: str) -> str:
    where = f" (mapped to {name})" if asked != name else ""
    return (
        f"FROM {asked}{where}: the engine has no such image and none is pulled; map the name to one that it has with "
        f"sandbox.docker.images: {{{asked}: LOCAL-IMAGE}}, or run `docker pull {name}`"
    )


def read_ca_bundle(path: str) -> bytes:
    """Of `sandbox.docker.ca_bundle`; raises SandboxError where it cannot be read."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise SandboxError(
            f"sandbox.docker.ca_bundle={path!r}: {error.strerror}; give a PEM file or leave it empty"
        ) from error
    if b"BEGIN CERTIFICATE" not in content:
        raise SandboxError(f"sandbox.docker.ca_bundle={path!r} holds no PEM certificate; give a PEM file")
    return content
