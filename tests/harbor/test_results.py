import json
from pathlib import Path

import pytest

from rsi.harbor.records import FormatError
from rsi.harbor.results import (
    AgentInfo,
    AgentResult,
    ErrorPolicyOverride,
    ExceptionInfo,
    GitTask,
    JobResult,
    LocalTask,
    ModelInfo,
    PackageTask,
    RolloutDetail,
    StepResult,
    Timing,
    TrialRecord,
    TrialResult,
    VerifierResult,
    job_json,
    job_stats,
    parse_job,
    parse_trial,
    pass_at_k,
    read_job,
    step_rewards,
    trial_config,
    trial_json,
    write_job,
)

NOW = "2026-01-01T00:00:00+00:00"


def trial(name: str, reward: float | None, task: str = "org/a", error: str = "", **more) -> TrialResult:
    info = ExceptionInfo(error, "m", "t", NOW) if error else None
    return TrialResult(
        task_name=task,
        trial_name=name,
        trial_uri=f"file:///{name}",
        task_id=LocalTask("/a"),
        task_checksum="c",
        config=trial_config(Path("/a"), name, "rsi", "tiny"),
        agent_info=AgentInfo("rsi", "0.1", ModelInfo("tiny")),
        verifier_result=None if reward is None else VerifierResult({"reward": reward}),
        exception_info=info,
        **more,
    )


def test_a_trial_reads_back_with_all_that_it_says() -> None:
    written = trial(
        "t",
        1.0,
        error="AgentTimeoutError",
        source="set",
        agent_result=AgentResult(5, 1, 2, 0.5, rollout_details=(RolloutDetail(((1, 2),), ((3,),), ((-0.5,),)),)),
        verifier_environment_mode="separate",
        verifier=Timing(NOW, NOW),
        step_results=(StepResult("s", exception_info=ExceptionInfo("HealthcheckError", "m", "t", NOW)),),
    )
    table = json.loads(trial_json(written))
    assert table["reward_valid"] is False  # a step's environment was never healthy
    assert table["exception_info"]["policy"] == {"should_retry": False, "should_grade": True, "has_valid_reward": True}
    assert parse_trial(trial_json(written)) == (written, ())
    assert parse_trial(json.dumps({**table, "later": 1}).encode())[1] == ("later",)


@pytest.mark.parametrize("task_id", [LocalTask("/p"), GitTask("u", "p", "c"), PackageTask("o", "n", "sha256:1")])
def test_tasks_are_named_by_path_repository_or_package(task_id) -> None:
    written = TrialResult("a", "t", "u", task_id, "c", {}, AgentInfo("x", "1"))
    assert parse_trial(trial_json(written))[0].task_id == task_id


@pytest.mark.parametrize(
    "error, is_valid",
    [
        ("", True),
        ("AgentTimeoutError", True),
        ("NonZeroAgentExitCodeError", True),
        ("VerifierTimeoutError", False),
        ("EnvironmentStartTimeoutError", False),
        ("CancelledError", False),
        ("SomethingNew", True),
    ],
)
def test_a_reward_is_valid_by_the_kind_of_error(error: str, is_valid: bool) -> None:
    assert trial("t", 1.0, error=error).reward_valid is is_valid
    assert not trial("t", None, error=error).reward_valid


def test_an_override_changes_the_policy_of_one_error() -> None:
    info = ExceptionInfo("SomethingNew", "m", "t", NOW, ErrorPolicyOverride(has_valid_reward=False))
    assert not info.policy.has_valid_reward and info.policy.should_retry


def test_the_statistics_of_a_job_leave_invalid_trials_out_of_means() -> None:
    trials = [
        trial("a1", 1.0, agent_result=AgentResult(10, None, 1)),
        trial("a2", 0.0, agent_result=AgentResult(5, 2, 1)),
        trial("a3", 0.0, error="VerifierTimeoutError"),
        trial("a4", None, error="CancelledError"),
    ]
    stats = job_stats(trials, n_total_trials=6)
    [(key, found)] = stats.evals.items()
    assert key == "rsi__tiny__adhoc"
    assert (found.n_trials, found.n_errors, found.metrics) == (2, 2, ({"mean": 0.5},))
    assert found.reward_stats == {"reward": {1.0: ("a1",), 0.0: ("a2",)}}
    assert found.exception_stats == {"VerifierTimeoutError": ("a3",), "CancelledError": ("a4",)}
    assert (stats.n_completed_trials, stats.n_errored_trials, stats.n_cancelled_trials) == (4, 2, 1)
    assert (stats.n_pending_trials, stats.n_input_tokens, stats.n_cache_tokens, stats.n_output_tokens) == (2, 15, 2, 2)


def test_pass_at_k_is_one_minus_the_chance_of_k_failures() -> None:
    # Task a: 1 of 4 passes; task b: 2 of 5, of which the fifth is more than the fewest.
    trials = [trial(f"a{i}", float(i == 0)) for i in range(4)]
    trials += [trial(f"b{i}", float(i < 2), task="org/b") for i in range(5)]
    by_hand = {2: ((1 - 3 / 6) + (1 - 3 / 10)) / 2, 4: 1.0}
    assert pass_at_k(trials) == pytest.approx(by_hand)
    assert pass_at_k([*trials, trial("c", 0.5, task="org/c")]) == {}
    assert pass_at_k(trials[:1]) == {} == pass_at_k([])
    assert list(pass_at_k([trial(f"a{i}", 1.0) for i in range(11)])) == [2, 4, 5, 8, 10]


def test_step_rewards_are_harbors_mean_over_measured_steps_or_the_last() -> None:
    steps = [
        StepResult("a", verifier_result=VerifierResult({"reward": 1.0, "style": 0.5})),
        StepResult("b"),
        StepResult("c", verifier_result=VerifierResult({"reward": 0.0})),
    ]
    assert step_rewards(steps, final=False) == {"reward": 0.5, "style": 0.25}
    assert step_rewards(steps, final=True) == {"reward": 0.0}
    assert step_rewards(steps[:2], final=True) is None and step_rewards(steps[1:2], final=False) is None


def test_a_job_directory_reads_back(tmp_path: Path) -> None:
    trials = [trial("a__1", 1.0), trial("a__2", 0.0)]
    job = JobResult("b7d0a8a0-0000-4000-8000-000000000000", NOW, 2, job_stats(trials, 2), finished_at=NOW)
    digest = "sha256:" + "0" * 64
    records = [TrialRecord(each, digest, {"verifier/reward.txt": b"1\n", "steps/s/x": b"y"}) for each in trials]
    write_job(tmp_path / "jobs" / "j", job, records)
    assert (tmp_path / "jobs/j/a__1/verifier/reward.txt").read_bytes() == b"1\n"
    found, read = read_job(tmp_path / "jobs" / "j")
    assert found == job
    assert [(record.result, record.task_digest) for record in read] == [(each, digest) for each in trials]
    with pytest.raises(FileExistsError):
        write_job(tmp_path / "jobs" / "j", job, records)


def test_older_jobs_are_read() -> None:
    old = {"id": "x", "started_at": NOW, "n_total_trials": 3, "stats": {"n_trials": 2, "n_errors": 1}}
    job, unknown = parse_job(json.dumps({**old, "status": {"n_running_trials": 1, "updated_at": NOW}}).encode())
    stats = job.stats
    assert (stats.n_completed_trials, stats.n_errored_trials, stats.n_running_trials, unknown) == (2, 1, 1, ())
    assert parse_job(job_json(job))[0] == job


@pytest.mark.parametrize("content", [b"[]", b"{", b"[" * 100_000, b'{"id": "x", "started_at": "yesterday"}'])
def test_a_broken_result_is_refused(content: bytes) -> None:
    with pytest.raises(FormatError):
        parse_job(content)
