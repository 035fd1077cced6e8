from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from rsi.harbor.grade import Grader
from rsi.harbor.records import FormatError
from rsi.harbor.task import PEOPLE, task_config, task_from_files
from rsi.harbor.tb1 import Imported, import_directory, import_files
from rsi.sandbox import Backend

COMPOSE = """services:
  client:
    build: {dockerfile: Dockerfile}
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    command: [sh, -c, sleep infinity]
    environment:
      - TEST_DIR=${T_BENCH_TEST_DIR}
    volumes:
      - ${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}
"""
V1 = {
    "task.yaml": b"instruction: |-\n  Sort kamo.txt into rilo.txt.\ndifficulty: easy\ntags: [sort]\n"
    b"max_agent_timeout_sec: 30\nparser_name: pytest\n",
    "Dockerfile": b"FROM rsi/base\nWORKDIR /app\nCOPY kamo.txt /app/\n",
    "docker-compose.yaml": COMPOSE.encode(),
    "solution.sh": b"#!/bin/bash\nsort kamo.txt >rilo.txt\n",
    "run-tests.sh": b'#!/bin/bash\nset -e\npython3 -m pytest -q "$TEST_DIR/test_outputs.py" -rA\n',
    "tests/test_outputs.py": b"def test_rilo():\n    assert open('/app/rilo.txt').read() == 'a\\nb\\n'\n",
    "kamo.txt": b"b\na\n",
}


def v1(files: Mapping[str, bytes] | None = None, lines: str = "", compose: str = COMPOSE) -> Imported:
    changed = V1 | {"task.yaml": V1["task.yaml"] + lines.encode(), "docker-compose.yaml": compose.encode()}
    return import_files({**changed, **(files or {})}, "v1/sort")


def test_each_part_finds_its_place() -> None:
    imported = v1()
    task = task_from_files(imported.files, bounds=PEOPLE)
    config = task_config(task)
    assert task.instruction == "Sort kamo.txt into rilo.txt."
    assert task.files["solution/solve.sh"] == V1["solution.sh"] and task.files["environment/kamo.txt"] == b"b\na\n"
    assert (config.agent.timeout_sec, config.verifier.timeout_sec) == (30.0, 60.0)
    assert config.metadata["difficulty"] == "easy" and config.metadata["tags"] == ["sort"]
    assert config.task is not None and config.task.name == "v1/sort"
    assert imported.notes == ()


def test_an_imported_task_rewards_its_solution_and_not_its_absence(with_grader) -> None:
    # `set -e` ends the script at its failing tests: lines appended to it would never have run.
    task = task_from_files(v1().files, bounds=PEOPLE)

    async def main(grader: Grader, _: Backend) -> None:
        run = await grader.run_solution(task)
        assert (await grader.grade(task, run.outputs)).reward == 1.0
        assert (await grader.grade(task, await grader.initial(task))).reward == 0.0

    with_grader(main)


@pytest.mark.parametrize(
    "files, lines, complaint",
    [
        ({"solution.yaml": b"- command: x"}, "", "solution.yaml"),
        ({}, "run_tests_in_same_shell: true\n", "run_tests_in_same_shell"),
        ({"task.yaml": V1["task.yaml"].replace(b"parser_name: pytest", b"parser_name: swebench")}, "", "swebench"),
        ({"task.yaml": b"difficulty: easy"}, "", "task.yaml.instruction is missing"),
        ({"task.yaml": b"instruction: [a"}, "", "task.yaml is not YAML"),
        ({"task.yaml": b"a: &a [x]\n" + b"b: {<<: *a}\n" * 9}, "", "merge keys"),
        ({"docker-compose.yaml": b"services: [a]"}, "", "not a table of services"),
        ({"docker-compose.yaml": b"services: {client: {build: ../out}}"}, "", "'../out' lies outside"),
        ({"docker-compose.yaml": b"services: {client: {build: ., environment: [KEY]}}"}, "", "KEY comes from the host"),
        ({"docker-compose.yaml": b"services: {client: {build: ., environment: {A: [x]}}}"}, "", "not plain text"),
    ],
)
def test_what_would_be_graded_otherwise_is_refused_by_name(
    files: Mapping[str, bytes], lines: str, complaint: str
) -> None:
    with pytest.raises(FormatError, match=complaint):
        v1(files, lines)


def test_missing_parts_are_named() -> None:
    for name in ("task.yaml", "run-tests.sh"):
        with pytest.raises(FormatError, match=f"{name} is missing"):
            import_files({path: content for path, content in V1.items() if path != name})


def test_what_compose_says_of_one_service_goes_into_the_dockerfile() -> None:
    compose = COMPOSE.replace("    volumes:", '      - A=b "c"\n    working_dir: /srv\n    expose: [80]\n    volumes:')
    compose += "    entrypoint: /run.sh\n    platform: linux/amd64\n"
    dockerfile = v1(compose=compose).files["environment/Dockerfile"].decode()
    assert dockerfile.startswith("FROM --platform=linux/amd64 rsi/base\n")
    assert dockerfile.endswith(
        'ENV TEST_DIR=/tests\nENV A="b \\"c\\""\nWORKDIR /srv\nEXPOSE 80\nENTRYPOINT ["/run.sh"]\n'
    )
    assert "environment/docker-compose.yaml" not in v1(compose=compose).files


def test_several_services_stay_compose_with_the_main_one_renamed() -> None:
    compose = COMPOSE + "    privileged: true\n  db:\n    build: {context: ./db}\n    depends_on: [client]\n"
    imported = v1({"db/Dockerfile": b"FROM db\n", "db/data": b"d"}, compose=compose)
    written = yaml.safe_load(imported.files["environment/docker-compose.yaml"])
    assert list(written["services"]) == ["main", "db"]
    assert written["services"]["main"]["privileged"] is True
    assert written["services"]["main"]["image"] == "${MAIN_IMAGE_NAME}"
    assert written["services"]["db"]["depends_on"] == ["main"]
    assert imported.files["environment/db/data"] == b"d"
    assert any("our sandboxes do not run it" in note for note in imported.notes)


def test_tests_and_solutions_in_the_image_are_flagged_as_leaks() -> None:
    dockerfile = V1["Dockerfile"] + b"COPY ./tests /old\nADD solution.sh /s\n"
    imported = v1({"Dockerfile": dockerfile})
    assert "environment/tests/test_outputs.py" in imported.files and "environment/solution.sh" in imported.files
    assert [note.split()[0] for note in imported.notes] == ["leak:", "leak:"]


def test_a_directory_is_imported_and_links_that_lead_out_are_not(tmp_path: Path) -> None:
    for path, content in V1.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(content)
    assert import_directory(tmp_path, "v1/sort") == v1()
    (tmp_path / "link").symlink_to("/etc/hostname")
    with pytest.raises(FormatError, match="'link' is not a regular file inside"):
        import_directory(tmp_path)
