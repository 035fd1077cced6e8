"""Run by test_real_harbor.py in .venv-harbor: our files against Harbor's readers, and Harbor's against ours."""

# pyright: reportMissingImports=false
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harbor.agents.nop import NopAgent
from harbor.cli.main import app
from harbor.lint.models import DEFAULT_RULES
from harbor.lint.task import lint_task
from harbor.mappers.terminal_bench import TerminalBenchMapper
from harbor.models.dataset.manifest import DatasetManifest
from harbor.models.job.config import JobConfig
from harbor.models.job.lock import JobLock, TrialLock
from harbor.models.job.result import JobResult as HarborJob
from harbor.models.job.result import JobStats as HarborStats
from harbor.models.registry import DatasetSpec
from harbor.models.task.config import TaskConfig as HarborConfig
from harbor.models.task.task import Task as HarborTask
from harbor.models.task.task import strip_canary as harbor_strip_canary
from harbor.models.trajectories import Trajectory as HarborTrajectory
from harbor.models.trial.config import TrialConfig
from harbor.models.trial.error_policy import ERROR_POLICIES as HARBOR_POLICIES
from harbor.models.trial.result import TrialResult as HarborTrial
from harbor.publisher.packager import Packager
from harbor.trial.trial import Trial
from harbor.utils.pass_at_k import compute_pass_at_k_by_evals
from typer.testing import CliRunner

from rsi.domains.terminal import draw_tasks
from rsi.harbor import tb1
from rsi.harbor.atif import Agent, Reply, atif_json, atif_of, parse_atif, rollout_details, turns
from rsi.harbor.config import TaskConfig, artifact_of, config_toml, config_toml_1_1, parse_config
from rsi.harbor.dataset import Dataset, DatasetInfo, FileRef, TaskRef, dataset_toml, parse_dataset, parse_registry
from rsi.harbor.digest import directory_digest
from rsi.harbor.grade import Grader
from rsi.harbor.records import FormatError, plain
from rsi.harbor.results import (
    ERROR_POLICIES,
    AgentInfo,
    AgentResult,
    ErrorPolicyOverride,
    ExceptionInfo,
    JobResult,
    LocalTask,
    ModelInfo,
    RolloutDetail,
    StepResult,
    TrialRecord,
    TrialResult,
    VerifierResult,
    job_json,
    job_stats,
    parse_job,
    parse_trial,
    read_trial,
    step_rewards,
    trial_config,
    trial_json,
    write_job,
)
from rsi.harbor.task import PEOPLE, read_task, strip_canary, task_config, task_from_files, write_task
from rsi.types import Stop, Task, Trajectory, Turn
from rsi_eval.heldout import load_suite
from tests.harbor.test_config import EVERYTHING
from tests.harbor.test_tb1 import COMPOSE, V1
from tests.harbor.test_whole import reward_of, separate, stepwise, whole

NOW = "2026-01-01T00:00:00+00:00"
SAMPLES = 12


def written(task: Task, path: Path) -> Path:
    write_task(task, path)
    return path


def fields(config: HarborConfig) -> dict[str, Any]:
    """Harbor's record as ours would be told: without nulls, empties and defaults that stand for them."""
    return prune(config.model_dump(mode="json"))


def prune(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: prune(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item not in (None, {}, [])}
    return [prune(item) for item in value] if isinstance(value, list) else value


# ---- task.toml


def test_harbor_reads_every_field_that_we_write_and_we_what_it_writes() -> None:
    everything = EVERYTHING.replace(b", when = 2026-01-01T00:00:00Z", b"")  # Harbor makes a text of a time
    theirs = HarborConfig.model_validate_toml(everything.decode())
    ours = parse_config(everything).config
    assert prune(plain(ours)) == fields(theirs)
    again = HarborConfig.model_validate_toml(config_toml(ours).decode())
    assert fields(again) == fields(theirs)
    # Its own writer cannot mix bare artifacts with tables in one list.
    alike = HarborConfig.model_validate_toml(
        everything.replace(b'["/app/out", ', b'[{ source = "/app/out" }, ').decode()
    )
    back = parse_config(alike.model_dump_toml().encode()).config
    assert replace(back, artifacts=()) == replace(ours, artifacts=())
    assert list(map(artifact_of, back.artifacts)) == list(map(artifact_of, ours.artifacts))
    # And no field of theirs is unknown to us.
    assert set(HarborConfig.model_fields) == set(TaskConfig.__dataclass_fields__)


def test_harbor_reads_the_defaults_and_old_spellings_as_we_do() -> None:
    for toml in (
        "",
        'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "500M"\nallow_internet = false\n',
        "[environment]\nallow_internet = true\n[verifier.environment]\nallow_internet = false\n",
        '[environment]\nallow_internet = false\nnetwork_mode = "public"\n',
        "[[steps]]\nname = 'a'\n[steps.verifier.environment]\nallow_internet = false\n",
        '[environment]\nos = "WINDOWS"\ncpus = 2.0\n',
    ):
        theirs = HarborConfig.model_validate_toml(toml)
        assert prune(plain(parse_config(toml.encode()).config)) == fields(theirs), toml
    export = config_toml_1_1(parse_config(b"[environment]\nallow_internet = false\n").config).decode()
    assert HarborConfig.model_validate_toml(export).environment.network_mode.value == "no-network"


BROKEN = [
    "[task]\nname = 'plain'",
    "[task]\nname = 'a/b..c'",
    "[task]\nname = 'a/b'\nversion = ''",
    "[agent]\nallowed_hosts = ['a']",
    "[environment]\nallowed_hosts = ['a']",
    "[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['http://a']",
    "[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['10.0.0.1/8']",
    "[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['*.1.2.3.4']",
    "[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a:80']",
    "[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]",
    "[environment]\nos = 'plan9'",
    "[environment]\ncpus = inf",
    "[environment]\nmemory = '1G'\nmemory_mb = 5",
    "[environment]\nmemory = '1T'",
    "[environment.tpu]\ntype = 'v'\ntopology = '2'",
    "[[environment.mcp_servers]]\nname = 'a'",
    "[[environment.mcp_servers]]\nname = 'a'\ntransport = 'stdio'",
    "[[environment.mcp_servers]]\nname = 'a'\nurl = 'u'\nheaders = { Authorization = 'Bearer x' }",
    "[[environment.mcp_servers]]\nname = 'a'\nurl = 'u'\nheaders = { X = '${broken' }",
    "[[verifier.collect]]\ncommand = 'x'\nservice = '-'",
    "artifacts = ['../x']",
    "artifacts = [{ source = 'a', destination = '/b' }]",
    "artifacts = [{ source = 'a', destination = 'manifest.json' }]",
    "artifacts = [{ source = 'a', service = 'db' }]",
    "[[steps]]\nname = 'a.'",
    "[[steps]]\nname = 'NUL.txt'",
    "[[steps]]\nname = 'é'\n[[steps]]\nname = 'É'",
]
ALSO_FINE = [
    "[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['A.b.', '*.c', '10.0.0.0/8', '::1', '1.2.3.4']",
    "[environment]\nnetwork_mode = 'public'\nallowed_hosts = []",
    "[[environment.mcp_servers]]\nname = 'a'\nurl = 'u'\nheaders = { Authorization = 'Bearer ${T}', X-Tokens = '3' }",
    "artifacts = ['/logs/artifacts', { source = '/a/', destination = '' }]",
    "[agent]\nuser = 0\n[metadata]\nx = [1, { y = 2026-01-01 }]",
    "[[steps]]\nname = 'COM0 x'\nmin_reward = { a = 1 }",
]


@pytest.mark.parametrize("toml", BROKEN)
def test_what_harbor_refuses_we_refuse(toml: str) -> None:
    with pytest.raises(ValueError):
        HarborConfig.model_validate_toml(toml)
    with pytest.raises(FormatError):
        parse_config(toml.encode())


@pytest.mark.parametrize("toml", ALSO_FINE)
def test_what_harbor_takes_we_take_and_say_alike(toml: str) -> None:
    theirs = HarborConfig.model_validate_toml(toml)
    ours = parse_config(toml.encode()).config
    assert fields(HarborConfig.model_validate_toml(config_toml(ours).decode())) == fields(theirs)


def test_canaries_are_stripped_alike() -> None:
    lines = ["<!-- canary x -->", "# CANARY", "", "  ", "Do it.", "# canary", "<!-- other -->", "#canary"]
    for seed in range(200):
        text = "\n".join(random.Random(seed).choices(lines, k=6))
        # Harbor drops leading blank lines of any instruction; a reader of ours sees it stripped in any case.
        assert strip_canary(text).strip() == harbor_strip_canary(text).strip(), text


# ---- directories


def test_every_sample_task_is_one_to_harbor_with_our_digest(tmp_path: Path) -> None:
    tasks = [*draw_tasks(SAMPLES, 2, "seed", np.random.default_rng(0)), *(t.task for t in load_suite()[:SAMPLES])]
    for number, task in enumerate(tasks):
        folder = written(task, tmp_path / str(number))
        assert HarborTask.is_valid_dir(folder)
        theirs = HarborTask(folder)
        assert theirs.instruction.strip() == task.instruction
        assert fields(theirs.config) == prune(plain(task_config(task)))
        assert "sha256:" + Packager.compute_content_hash(folder)[0] == task.id == directory_digest(folder)
        assert read_task(folder, task.domain, task.lineage) == task
        # Our own grader runs a shared verifier in a fresh sandbox, so nothing is lost by it.
        found = [finding.rule.value for finding in lint_task(folder, selected_rules=set(DEFAULT_RULES))]
        assert found == ["shared-verifier"]


@pytest.mark.parametrize("kind", ["plain", "separate", "own image", "steps"])
def test_tasks_with_all_that_harbor_has_are_valid_to_it(tmp_path: Path, kind: str) -> None:
    bundled = {"tests/Dockerfile": b"FROM rsi/base\nCOPY test.sh /tests/\n"}
    task = {
        "plain": whole(),
        "separate": separate(b""),
        "own image": separate(b"", **bundled),
        "steps": stepwise(first=b"min_reward = 0.5\n"),
    }[kind]
    folder = written(task, tmp_path / "t")
    assert HarborTask.is_valid_dir(folder)
    assert "sha256:" + Packager.compute_content_hash(folder)[0] == task.id
    assert fields(HarborTask(folder).config) == prune(plain(task_config(task)))


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--steps", "3"],
        ["--verifier-mode", "shared"],
        ["--no-pytest", "--no-solution"],
        ["--include-canary-strings", "--include-standard-metadata"],
        ["--no-package"],
    ],
    ids=" ".join,
)
def test_what_harbor_scaffolds_we_read(tmp_path: Path, options: list[str]) -> None:
    command = ["init", "org/made", "--task", "-o", str(tmp_path), "--author", "A <a@b.c>", *options]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    [folder] = [path.parent for path in tmp_path.rglob("task.toml")]
    task = read_task(folder, bounds=PEOPLE)
    theirs = HarborTask(folder)
    assert fields(theirs.config) == prune(plain(task_config(task)))
    assert task.id == "sha256:" + Packager.compute_content_hash(folder)[0]
    assert theirs.instruction.strip() == task.instruction
    assert parse_config((folder / "task.toml").read_bytes()).notes == ()
    assert written(task, tmp_path / "copy") and Packager.compute_content_hash(tmp_path / "copy")[0] in task.id


def empty(folder: str, *names: str) -> dict[str, bytes]:
    return {f"{folder}/{name}": b"" for name in names}


IGNORED = b"*.log\n!keep.log\n/README.md\nbuild/\n**/deep/*.x\n\\#odd\n"
ODD: dict[str, dict[str, bytes]] = {
    "defaults": empty("tests", "a.pyc", "__pycache__/b", "x~", ".DS_Store", ".a.swp")
    | {"environment/__pycache__": b"f"},
    "gitignore": {".gitignore": IGNORED, "README.md": b"r"}
    | empty("tests", "a.log", "keep.log", "build/x", "deep/a.x", "q/deep/b.x", "#odd", "c.pyc"),
    "harborignore": {
        "tests/.harborignore": b"data/\n!data/keep\n*.tmp\n!kept.tmp\n/only\n# c\n\n",
        "tests/sub/.harborignore": b"!b.tmp\n/c\n",
        "environment/.harborignore": b"*\n",
        "steps/one/solution/.harborignore": b"z\n",
        "solution/.harborignore": b"sub/**\n!sub/\n",
    }
    | empty("tests", "data/keep", "data/x", "a.tmp", "kept.tmp", "only", "sub/only", "sub/b.tmp", "sub/c", "c")
    | empty(".", "environment/q", "steps/one/solution/z", "steps/one/z", "solution/sub/a/b", "solution/z"),
    "both": {".gitignore": b"tests/*.a\n", "tests/.harborignore": b"*.b\n"} | empty("tests", "1.a", "1.b", "1.c"),
    "unicode": empty("tests", "ü", "日本/語", "e\u0301") | empty("steps", "ß/x") | empty("environment", "a b'c\""),
    "order": {f"tests/{name}": name.encode() for name in ("a-b", "a/b", "a.b", "a0", "A", "_")},
    "nested": {"trajectory.json": b"{}", "environment/deep/" + "d/" * 40 + "f": b"x"} | empty("tests", "empty"),
}


@pytest.mark.parametrize("kind", ODD)
def test_digests_agree_on_odd_directories(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "t"
    for path, content in {**whole().files, **ODD[kind]}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    (root / "environment/nothing").mkdir()
    theirs = "sha256:" + Packager.compute_content_hash(root)[0]
    assert directory_digest(root) == theirs
    assert read_task(root, bounds=PEOPLE).id == theirs


def test_digests_agree_on_links(tmp_path: Path) -> None:
    root = written(whole(), tmp_path / "t")
    (root / "tests/.harborignore").write_text("hidden\n")
    (root / "tests/hidden").write_text("h")
    (root / "tests/link").symlink_to("../instruction.md")
    (root / "tests/shown").symlink_to("hidden")
    (root / "tests/chain").symlink_to("link")
    (root / "environment/folder").symlink_to("../solution")
    (root / "README.md").symlink_to("instruction.md")
    assert directory_digest(root) == "sha256:" + Packager.compute_content_hash(root)[0]
    other = tmp_path / "other"
    root.rename(other)
    (other / "solution").rename(other / "kept")
    (other / "solution").symlink_to("kept")
    assert directory_digest(other) == "sha256:" + Packager.compute_content_hash(other)[0]


def test_random_ignore_rules_agree(tmp_path: Path) -> None:
    rng = random.Random(0)
    names = ["a", "b.log", "c.tmp", "d/e", "d/f.log", "d/g/h", "g/b.log", "g/.x"]
    rules = [
        "*.log",
        "!b.log",
        "d/",
        "/a",
        "g",
        "!d/e",
        "d/**",
        "**/h",
        "*",
        "!*/",
        "!a",
        "?",
        "[ab]",
        "d/*",
        "\\!x",
        "g/",
    ]
    for number in range(40):
        root = tmp_path / str(number)
        for folder in ("tests", "environment", "solution/tests"):
            for name in names:
                (root / folder / name).parent.mkdir(parents=True, exist_ok=True)
                (root / folder / name).write_text(name)
        for path in rng.sample(
            [".gitignore", "tests/.harborignore", "tests/d/.harborignore", "solution/.harborignore"], 2
        ):
            (root / path).write_text("\n".join(rng.choices(rules, k=3)) + "\n")
        assert directory_digest(root) == "sha256:" + Packager.compute_content_hash(root)[0], number


# ---- datasets


def test_dataset_manifests_and_hashes_agree() -> None:
    one, two = "sha256:" + "1" * 64, "sha256:" + "2" * 64
    ours = Dataset(
        DatasetInfo("org/set", "1", "d", keywords=("k",)),
        tasks=(TaskRef("org/b", two), TaskRef("org/a", one)),
        files=(FileRef("metric.py", one),),
        metadata={"x": 1},
    )
    theirs = DatasetManifest.from_toml(dataset_toml(ours).decode())
    assert theirs.compute_content_hash() == ours.content_hash
    assert parse_dataset(theirs.to_toml().encode()) == (ours, ())
    bare = replace(ours, files=())
    assert DatasetManifest.from_toml(dataset_toml(bare).decode()).compute_content_hash() == bare.content_hash
    row = {"name": "s", "version": "1", "description": "", "tasks": [{"name": "t", "path": "p", "git_url": "u"}]}
    spec = DatasetSpec.model_validate(row).model_dump(mode="json")
    assert prune(plain(parse_registry(json.dumps([spec]).encode())[0])) == prune(spec)


# ---- results


def a_trial(name: str = "t__1", reward: float | None = 1.0, error: str = "", **more: Any) -> TrialResult:
    return TrialResult(
        task_name="org/a",
        trial_name=name,
        trial_uri=f"file:///{name}",
        task_id=LocalTask("/a"),
        task_checksum="c",
        config=trial_config(Path("/a"), name, "rsi", "tiny"),
        agent_info=AgentInfo("rsi", "0.1", ModelInfo("tiny", "us")),
        agent_result=AgentResult(5, 1, 2, 0.5, rollout_details=(RolloutDetail(((1, 2),), ((3,),), ((-0.5,),)),)),
        verifier_result=None if reward is None else VerifierResult({"reward": reward}),
        exception_info=ExceptionInfo(error, "m", "t", NOW, ErrorPolicyOverride(True)) if error else None,
        started_at=NOW,
        **more,
    )


def trials() -> list[TrialResult]:
    errors = ("", "", "", "AgentTimeoutError", "VerifierTimeoutError", "CancelledError", "Unheard")
    rewards = (1.0, 0.0, 1.0, 1.0, 0.0, None, 1.0)
    return [a_trial(f"t__{i}", reward, error) for i, (reward, error) in enumerate(zip(rewards, errors, strict=True))]


def test_our_trials_are_harbors_with_the_same_validity() -> None:
    steps = (StepResult("s", AgentResult(1), VerifierResult({"reward": 0.5})),)
    for ours in [*trials(), a_trial(step_results=steps, verifier_environment_mode="separate")]:
        theirs = HarborTrial.model_validate_json(trial_json(ours))
        assert theirs.reward_valid == ours.reward_valid
        back, unknown = parse_trial(theirs.model_dump_json().encode())
        assert unknown == ()
        assert json.loads(trial_json(replace(back, config=ours.config)).replace(b'00Z"', b'00+00:00"')) == json.loads(
            trial_json(ours)
        )


def test_the_table_of_errors_is_harbors() -> None:
    theirs = {name: (p.should_retry, p.should_grade, p.has_valid_reward) for name, p in HARBOR_POLICIES.items()}
    ours = {name: (p.should_retry, p.should_grade, p.has_valid_reward) for name, p in ERROR_POLICIES.items()}
    assert ours == theirs


def test_statistics_and_pass_at_k_are_harbors() -> None:
    ours = trials()
    theirs = [HarborTrial.model_validate_json(trial_json(trial)) for trial in ours]
    stats = HarborStats.from_trial_results(theirs, n_total_trials=9)
    for key, passed in compute_pass_at_k_by_evals(theirs).items():
        stats.evals[key].pass_at_k = passed
    mine = plain(job_stats(ours, n_total_trials=9))
    for each in mine["evals"].values():
        each["metrics"] = []  # Harbor's job computes them apart
    assert prune(json.loads(json.dumps(mine))) == prune(json.loads(stats.model_dump_json()))
    assert mine["evals"]["rsi__tiny__adhoc"]["pass_at_k"]


def test_job_directories_are_read_by_harbor(tmp_path: Path) -> None:
    ours = trials()
    job = JobResult(
        "b7d0a8a0-0000-4000-8000-000000000000", NOW, len(ours), job_stats(ours), finished_at=NOW, updated_at=NOW
    )
    write_job(tmp_path / "jobs/j", job, [TrialRecord(trial, "sha256:" + "0" * 64) for trial in ours])
    folder = tmp_path / "jobs/j"
    theirs = HarborJob.model_validate_json((folder / "result.json").read_text())
    assert theirs.n_total_trials == len(ours) and theirs.stats.n_errored_trials == 4
    assert parse_job(theirs.model_dump_json().encode())[1] == ()
    assert parse_job(job_json(job))[0] == job
    config = JobConfig.model_validate_json((folder / "config.json").read_text())
    assert config.job_name == "j" and [agent.name for agent in config.agents] == ["rsi"]
    assert len(JobLock.model_validate_json((folder / "lock.json").read_text()).trials) == len(ours)
    trial = folder / "t__0"
    assert TrialConfig.model_validate_json((trial / "config.json").read_text()).agent.model_name == "tiny"
    assert TrialLock.model_validate_json((trial / "lock.json").read_text()).task.digest == "sha256:" + "0" * 64
    assert HarborTrial.model_validate_json((trial / "result.json").read_text()).reward_valid


# ---- trajectories


def test_our_trajectories_are_atif_to_harbor() -> None:
    shown = (Turn((1, 2), (3,), (-0.1,), 7, 7), Turn((4,), (5, 6), (-0.2, -0.3), 7, 8), Turn((7,), (8,), (-0.4,), 8, 8))
    rollout = Trajectory("solve-1", "sha256:0", "solver", shown, Stop.DONE)

    def split(text: str) -> Reply:
        return Reply("say", "think", (("bash", {"command": text}),) * (1 + ("5" in text)))

    for how in ({}, {"split": split}):
        ours = atif_of(rollout, lambda ids: " ".join(map(str, ids)), Agent("rsi", "0.1", "tiny"), reward=0.5, **how)
        theirs = HarborTrajectory.model_validate_json(atif_json(ours))
        assert [step.message for step in theirs.steps] == [step.message for step in ours.steps]
        back = parse_atif(json.dumps(theirs.to_json_dict()))
        assert back == ours and turns(back) == shown
        assert rollout_details(back)["completion_token_ids"] == ((3,), (5, 6), (8,))


# ---- Terminal-Bench v1


def test_imports_are_harbors_but_for_the_verifiers_script(tmp_path: Path) -> None:
    compose = COMPOSE + "  db:\n    build: {context: ./db}\n"
    sources = {
        "plain": V1,
        "leaky": {**V1, "Dockerfile": V1["Dockerfile"] + b"COPY tests /old\nCOPY solution.sh /s\n"},
        "services": {**V1, "docker-compose.yaml": compose.encode(), "db/Dockerfile": b"FROM db\n", "db/x": b"x"},
    }
    for name, files in sources.items():
        for path, content in files.items():
            (tmp_path / "old" / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "old" / name / path).write_bytes(content)
    result = TerminalBenchMapper().map(tmp_path / "old", tmp_path / "new")
    assert not result.failed
    for name in sources:
        theirs = tmp_path / "new" / name
        ours = tb1.import_directory(tmp_path / "old" / name).files
        listed = {path.relative_to(theirs).as_posix() for path in theirs.rglob("*") if path.is_file()}
        assert set(ours) == listed | {"tests/run-tests.sh"}
        same = listed - {"tests/test.sh", "task.toml", "environment/Dockerfile", "environment/docker-compose.yaml"}
        assert all(ours[path] == (theirs / path).read_bytes() for path in same)
        config = fields(HarborConfig.model_validate_toml((theirs / "task.toml").read_text()))
        assert prune(plain(parse_config(ours["task.toml"]).config)) == config
        recipe = [
            line for line in (theirs / "environment/Dockerfile").read_text().splitlines() if not line.startswith("#")
        ]
        assert [
            line for line in ours["environment/Dockerfile"].decode().splitlines() if not line.startswith("#")
        ] == recipe


# ---- Harbor's agents on our sandboxes


async def run_trial(task: Path, agent: str, trials_dir: Path, cache: str) -> Path:
    config = TrialConfig.model_validate(
        {
            "task": {"path": str(task)},
            "trial_name": agent,
            "trials_dir": str(trials_dir),
            "agent": {"name": agent},
            "environment": {
                "import_path": "rsi.sandbox.harbor:NamespaceEnvironment",
                "kwargs": {"cache_dir": cache} if cache else {},
            },
        }
    )
    await (await Trial.create(config)).run()
    return trials_dir / agent


KINDS = ("plain", "separate", "replaced folder", "own image", "steps", "low steps", "v1", "seed")


def a_task(kind: str) -> Task:
    low = b'#!/bin/bash\necho \'{"reward": 0.5, "style": 0.2}\' >/logs/verifier/reward.json\n'
    match kind:
        case "plain":
            return whole(b'env = { A = "b" }\n[agent]\ntimeout_sec = 60\n')
        case "separate":
            return separate(b"")
        case "replaced folder":
            made = b"FROM rsi/base\nWORKDIR /app\nCOPY kamo.txt /app/\nRUN mkdir out && touch out/a.txt out/stale\n"
            test = reward_of("[ -s /app/out/a.txt ] && ! [ -e /app/out/stale ]")
            solve = b"echo 1 >out/a.txt\nrm out/stale\n"
            files = {"environment/Dockerfile": made, "solution/solve.sh": solve, "tests/test.sh": test}
            return separate(b"", **files)
        case "own image":
            return separate(b"", **{"tests/Dockerfile": b"FROM rsi/base\nCOPY test.sh /tests/\n"})
        case "steps":
            return stepwise()
        case "low steps":
            return stepwise(first=b"min_reward = 0.6\n", **{"tests/test.sh": low})
        case "v1":
            files = dict(tb1.import_files(V1).files)
            files["task.toml"] = files["task.toml"].replace(b'"public"', b'"no-network"')
            return task_from_files(files, bounds=PEOPLE)
    return draw_tasks(1, 2, "seed", np.random.default_rng(1))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_oracle_and_nop_earn_what_ours_earn(tmp_path: Path, with_grader, kind: str) -> None:
    task = a_task(kind)
    folder = written(task, tmp_path / "t")

    async def ours(grader: Grader, agent: str) -> tuple[float, list[float]]:
        """The reward, and those of the steps that were reached."""
        if task_config(task).steps:
            run = await grader.run_steps(task, None if agent == "oracle" else nothing)
            assert run.verdict.reward is not None
            return run.verdict.reward, [step.graded.verdict.reward or 0.0 for step in run.steps]
        outputs = (await grader.run_solution(task)).outputs if agent == "oracle" else await grader.initial(task)
        reward = (await grader.grade(task, outputs)).reward
        assert reward is not None
        return reward, []

    async def main(grader: Grader, _) -> None:
        for agent in ("oracle", "nop"):
            path = await run_trial(folder, agent, tmp_path / "trials", "")
            record = read_trial(path)
            assert record.result.exceptions == (), record.result.exceptions
            assert record.task_digest == task.id
            reward, reached = await ours(grader, agent)
            steps = record.result.step_results or ()
            measured = [(step.verifier_result and step.verifier_result.rewards) or {} for step in steps]
            assert [rewards["reward"] for rewards in measured] == reached
            if steps:  # the mean over declared steps is ours alone
                assert record.result.rewards == step_rewards(steps, final=False)
                assert reward == sum(reached) / 2
            else:
                assert record.result.rewards == {"reward": reward}
            assert record.result.agent_info.name == agent

    with_grader(main)


async def nothing(sandbox: Any, step: Any) -> None:
    assert NopAgent.name() == "nop"
