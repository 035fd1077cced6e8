import pytest

from rsi.harbor.image import image_spec
from rsi.sandbox import BuildError, ImageSpec, Step
from rsi.types import Task

CONTEXT = {"environment/files/a.txt": b"a", "environment/files/sub/b.txt": b"b", "environment/run.sh": b"#!/bin/sh\n"}


def spec(dockerfile: str, workdir: str = "/app") -> ImageSpec:
    files = {**CONTEXT, "environment/Dockerfile": dockerfile.encode()}
    return image_spec(Task("sha256:0", "", "x", files, workdir=workdir))


def test_the_usual_dockerfile_copies_the_files_into_the_workdir() -> None:
    built = spec("FROM rsi/base\nWORKDIR /app\nCOPY files/ /app/\n")
    assert built == ImageSpec((Step(copy={"/app/a.txt": b"a", "/app/sub/b.txt": b"b"}),), (), "/app", "rsi/base")


@pytest.mark.parametrize(
    "line, copied",
    [
        ("COPY files/a.txt /app/", {"/app/a.txt": b"a"}),
        ("COPY files/a.txt /app", {"/app/a.txt": b"a"}),
        ("COPY files/a.txt .", {"/app/a.txt": b"a"}),
        ("COPY files/a.txt c.txt", {"/app/c.txt": b"a"}),
        ("COPY files /data", {"/data/a.txt": b"a", "/data/sub/b.txt": b"b"}),
        ("COPY files/a.txt run.sh /opt/x", {"/opt/x/a.txt": b"a", "/opt/x/run.sh": b"#!/bin/sh\n"}),
        ('COPY ["files/a.txt", "/x y"]', {"/x y": b"a"}),
    ],
)
def test_copy_follows_dockers_rules(line: str, copied: dict[str, bytes]) -> None:
    assert spec(f"FROM x\nWORKDIR /app\n{line}\n").steps == (Step(copy=copied),)


def test_run_sees_the_workdir_and_environment_of_its_line() -> None:
    built = spec(
        "FROM x\n# note\nENV A=1 B='two words'\nWORKDIR /srv\nRUN echo $A \\\n  > out\nENV C $A\nWORKDIR /app\n"
    )
    expected = "export A=1\nexport B='two words'\nmkdir -p /srv && cd /srv || exit\necho $A    > out"
    assert built.steps == (Step(run=expected),)
    assert built.env == (("A", "1"), ("B", "two words"), ("C", "1"))


def test_arg_is_known_to_from_and_run_and_not_kept() -> None:
    built = spec("ARG V=24.04\nFROM ubuntu:$V\nARG V\nARG W=1 X\nENV W=2\nWORKDIR /${Y:-srv}/$V\nRUN echo $W\n")
    assert built.base == "ubuntu:24.04" and built.env == (("W", "2"),)
    expected = "export V=24.04\nexport W=2\nmkdir -p /srv/24.04 && cd /srv/24.04 || exit\necho $W"
    assert built.steps == (Step(run=expected),)


def test_user_is_of_later_runs_and_of_the_image() -> None:
    built = spec("FROM x\nRUN one\nUSER bob:staff\nWORKDIR /w\nRUN two\n")
    assert [step.user for step in built.steps] == ["", "", "bob:staff"] and built.user == "bob:staff"
    assert built.steps[1].run == "mkdir -p /w"
    assert spec("FROM x\nUSER bob\nUSER root\n").user == ""


def test_run_as_a_list_is_quoted() -> None:
    (step,) = spec('FROM x\nRUN ["echo", "a b"]').steps
    assert step.run.endswith("echo 'a b'")


@pytest.mark.parametrize(
    "dockerfile, complaint",
    [
        ("FROM x\nEXPOSE 80", "line 2: EXPOSE: is not supported; use only FROM, WORKDIR, COPY, RUN, ENV, ARG and USER"),
        ("FROM x\nUSER no body", "line 2: USER: has 2 words"),
        ("FROM x\nUSER ../x", "is no user; write a name or a number"),
        ("FROM x\nARG 1=2", "write ARG NAME=default"),
        ("ARG V=1\nFROM x\nWORKDIR /$V", r"\$V is not set; set it with ENV or ARG"),
        ("ARG V=1\nRUN true", "does not begin with FROM"),
        ("FROM x\nFROM y", "line 2: FROM: more than one stage"),
        ("FROM x AS y", "line 1: FROM: more than one stage"),
        ("RUN true", "does not begin with FROM"),
        ("", "does not begin with FROM"),
        ("FROM x\n\nCOPY nothing/ /app/", "line 3: COPY: environment/nothing does not exist"),
        ("FROM x\nCOPY ../up /app/", r"\.\./up lies outside environment/"),
        ("FROM x\nCOPY files/a.txt /a/../../etc/x", "has a '..' in it"),
        ("FROM x\nCOPY --chown=1 files /app", "line 2: COPY: flags"),
        ("FROM x\nCOPY *.txt /app", "wildcards"),
        ("FROM x\nCOPY files", "needs a source and a destination"),
        ("FROM x\nWORKDIR $NOPE", r"\$NOPE is not set"),
        ("FROM x\nENV A B=1\nENV =1", "line 3: ENV"),
        ("FROM x\nRUN <<E", "here-documents"),
        ("FROM x\nCOPY 'open /app", "open quote"),
        ("FROM x\nRUN true \\", "ends in a backslash"),
        ("FROM x\nRUN", "has no argument"),
        ("FROM x\nRUN [1", "not a JSON list"),
        ("FROM x\n" + "RUN true\n" * 200, "201 instructions"),
    ],
)
def test_what_is_outside_the_subset_is_refused_by_name_and_line(dockerfile: str, complaint: str) -> None:
    with pytest.raises(BuildError, match=complaint):
        spec(dockerfile)


def test_a_dockerfile_that_is_missing_or_not_text_is_refused() -> None:
    with pytest.raises(BuildError, match="Dockerfile is missing"):
        image_spec(Task("sha256:0", "", "x", {}))
    with pytest.raises(BuildError, match="not utf-8"):
        image_spec(Task("sha256:0", "", "x", {"environment/Dockerfile": b"\xff"}))
