"""Job and trial results as Harbor writes them (harbor.md section 9), written and read.

A trial's reward is valid where its verifier gave one and no recorded error says otherwise; the table of errors is
Harbor's, as data. Invalid trials leave the denominators of means and pass@k, so report their number too.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from rsi.harbor.records import FormatError, plain, read_json, read_record, to_json

# ---- errors ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ErrorPolicy:
    should_retry: bool
    should_grade: bool
    has_valid_reward: bool


@dataclass(frozen=True)
class ErrorPolicyOverride:
    should_retry: bool | None = None
    should_grade: bool | None = None
    has_valid_reward: bool | None = None


UNLISTED = ErrorPolicy(True, True, True)
"""Harbor's rule for an exception that its table does not name; `rsi` itself takes no reward of such a trial."""
_POLICIES: tuple[tuple[ErrorPolicy, str], ...] = (
    (
        ErrorPolicy(True, False, False),
        "EnvironmentStartTimeoutError SandboxBuildFailedError AgentSetupTimeoutError HealthcheckError "
        "SandboxLikelyOutOfMemoryError MemoryLimitExceededError SSHAccessError GKEExecStreamClosedError "
        "GKEPodNotFoundError RuntimeRequestError AddTestsDirError DownloadVerifierDirError",
    ),
    (
        ErrorPolicy(True, True, False),
        "ApiError ApiRateLimitError ApiInternalServerError ApiOverloadedError ApiConnectionClosedError "
        "ApiResponseStalledError UnknownApiError NetworkConnectionError ApiConnectionError ApiUsageLimitError "
        "RateLimitError InternalServerError ServiceUnavailableError APIConnectionError APIError Timeout",
    ),
    (
        ErrorPolicy(False, True, False),
        "UnsupportedModelParametersError BadRequestError UnprocessableEntityError UnsupportedParamsError "
        "APIResponseValidationError BudgetExceededError VerifierTimeoutError RewardFileNotFoundError "
        "RewardFileEmptyError VerifierOutputParseError",
    ),
    (
        ErrorPolicy(False, False, False),
        "AgentAuthenticationError ModelNotFoundError ApiProviderResourceNotFoundError AuthenticationError "
        "PermissionDeniedError NotFoundError ServiceOperationsUnsupportedError VercelScopeError DspyImportError "
        "MissingExtraError RegradeError CancelledError",
    ),
    (
        ErrorPolicy(False, True, True),
        "NonZeroAgentExitCodeError AgentTimeoutError ContextWindowExceededError OutputTokenExceededError "
        "ContextLengthExceededError OutputLengthExceededError AgentSafetyRefusalError ContentPolicyViolationError",
    ),
)
ERROR_POLICIES: Mapping[str, ErrorPolicy] = {name: policy for policy, names in _POLICIES for name in names.split()}


# ---- records ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """ISO 8601."""

    started_at: str | None = None
    finished_at: str | None = None

    def __post_init__(self) -> None:
        _check_time(self.started_at)
        _check_time(self.finished_at)


@dataclass(frozen=True)
class ExceptionInfo:
    exception_type: str
    exception_message: str
    exception_traceback: str
    occurred_at: str
    policy_override: ErrorPolicyOverride | None = None

    def __post_init__(self) -> None:
        _check_time(self.occurred_at)

    @property
    def policy(self) -> ErrorPolicy:
        return replace(
            ERROR_POLICIES.get(self.exception_type, UNLISTED),
            **(plain(self.policy_override) if self.policy_override else {}),
        )


@dataclass(frozen=True)
class ModelInfo:
    name: str
    provider: str | None = None


@dataclass(frozen=True)
class AgentInfo:
    name: str
    version: str
    model_info: ModelInfo | None = None


@dataclass(frozen=True)
class RolloutDetail:
    """Lists by turn; a turn's prompt is the whole one, the history included."""

    prompt_token_ids: tuple[tuple[int, ...], ...] = ()
    completion_token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: tuple[tuple[float, ...], ...] = ()
    extra: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelUsage:
    n_input_tokens: int = 0
    n_cache_tokens: int = 0
    n_output_tokens: int = 0
    cost_usd: float | None = None


@dataclass(frozen=True)
class AgentResult:
    """n_input_tokens: those from the cache included."""

    n_input_tokens: int | None = None
    n_cache_tokens: int | None = None
    n_output_tokens: int | None = None
    cost_usd: float | None = None
    model_usage: Mapping[str, ModelUsage] | None = None
    rollout_details: tuple[RolloutDetail, ...] | None = None
    metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class VerifierResult:
    rewards: Mapping[str, int | float] | None = None


@dataclass(frozen=True)
class StepResult:
    step_name: str
    agent_result: AgentResult | None = None
    verifier_result: VerifierResult | None = None
    exception_info: ExceptionInfo | None = None
    agent_execution: Timing | None = None
    verifier: Timing | None = None


@dataclass(frozen=True)
class LocalTask:
    path: str


@dataclass(frozen=True)
class GitTask:
    git_url: str
    path: str
    git_commit_id: str | None = None


@dataclass(frozen=True)
class PackageTask:
    org: str
    name: str
    ref: str | None = None


@dataclass(frozen=True)
class TrialResult:
    """A trial's result.json. config: the trial's own config.json, as it is."""

    task_name: str
    trial_name: str
    trial_uri: str
    task_id: LocalTask | GitTask | PackageTask
    task_checksum: str
    config: Mapping[str, Any]
    agent_info: AgentInfo
    schema_version: Literal[1] = 1
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    source: str | None = None
    agent_result: AgentResult | None = None
    verifier_result: VerifierResult | None = None
    verifier_environment_mode: Literal["shared", "separate"] | None = None
    exception_info: ExceptionInfo | None = None
    started_at: str | None = None
    finished_at: str | None = None
    environment_setup: Timing | None = None
    agent_setup: Timing | None = None
    agent_execution: Timing | None = None
    verifier: Timing | None = None
    step_results: tuple[StepResult, ...] | None = None

    def __post_init__(self) -> None:
        _check_time(self.started_at)
        _check_time(self.finished_at)

    @property
    def exceptions(self) -> tuple[ExceptionInfo, ...]:
        """The trial's, then those of its steps."""
        recorded = [self.exception_info, *(step.exception_info for step in self.step_results or ())]
        return tuple(error for error in recorded if error is not None)

    @property
    def rewards(self) -> Mapping[str, int | float]:
        """Empty where there are none."""
        return (self.verifier_result and self.verifier_result.rewards) or {}

    @property
    def reward_valid(self) -> bool:
        return bool(self.rewards) and all(error.policy.has_valid_reward for error in self.exceptions)

    @property
    def eval_key(self) -> str:
        """agent__model__dataset, as a job's statistics are kept."""
        model = self.agent_info.model_info
        return "__".join([self.agent_info.name, *([model.name] if model else []), self.source or "adhoc"])

    @property
    def usage(self) -> AgentResult:
        """Tokens and cost of the trial, or of its steps together."""
        own = [self.agent_result] if self.agent_result else [step.agent_result for step in self.step_results or ()]
        results = [result for result in own if result is not None]

        def total(values: Iterable[Any]) -> Any:
            known = [value for value in values if value is not None]
            return sum(known) if known else None

        return AgentResult(
            total(result.n_input_tokens for result in results),
            total(result.n_cache_tokens for result in results),
            total(result.n_output_tokens for result in results),
            total(result.cost_usd for result in results),
        )


@dataclass(frozen=True)
class EvalStats:
    """n_trials: valid ones."""

    n_trials: int = 0
    n_errors: int = 0
    metrics: tuple[Mapping[str, Any], ...] = ()
    pass_at_k: Mapping[int, float] = field(default_factory=dict)
    reward_stats: Mapping[str, Mapping[float, tuple[str, ...]]] = field(default_factory=dict)
    exception_stats: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class JobStats:
    n_completed_trials: int = 0
    n_errored_trials: int = 0
    n_running_trials: int = 0
    n_pending_trials: int = 0
    n_cancelled_trials: int = 0
    n_retries: int = 0
    evals: Mapping[str, EvalStats] = field(default_factory=dict)
    n_input_tokens: int | None = None
    n_cache_tokens: int | None = None
    n_output_tokens: int | None = None
    cost_usd: float | None = None


@dataclass(frozen=True)
class JobResult:
    """A job's result.json."""

    id: str
    started_at: str
    n_total_trials: int
    stats: JobStats = JobStats()
    schema_version: Literal[1] = 1
    updated_at: str | None = None
    finished_at: str | None = None
    trial_results: tuple[TrialResult, ...] = ()

    def __post_init__(self) -> None:
        for time in (self.started_at, self.updated_at, self.finished_at):
            _check_time(time)


def _check_time(text: str | None) -> None:
    try:
        datetime.fromisoformat(text or "2000-01-01")
    except ValueError:
        raise ValueError(f"{text!r} is not an ISO 8601 time") from None


def now() -> str:
    return datetime.now(UTC).isoformat()


# ---- reading and writing ---------------------------------------------------------------------------------------------


def parse_trial(content: bytes) -> tuple[TrialResult, tuple[str, ...]]:
    """A trial's result.json, and the keys in it that we do not know. Raises FormatError."""
    unknown: list[str] = []
    return _trial(read_json(content, "result.json"), "", unknown), tuple(unknown)


def parse_job(content: bytes) -> tuple[JobResult, tuple[str, ...]]:
    """A job's result.json; older ones had `n_trials` and a `status`. Raises FormatError."""
    unknown: list[str] = []
    raw = read_json(content, "result.json")
    if not isinstance(raw, dict):
        raise FormatError("result.json is not an object")
    table = dict(raw)
    status = table.pop("status", None)
    stats = dict(table.get("stats") or {})
    for old, new in (("n_trials", "n_completed_trials"), ("n_errors", "n_errored_trials")):
        if old in stats:
            stats.setdefault(new, stats.pop(old))
            stats.pop(old, None)
    counts = {key: value for key, value in status.items() if key.startswith("n_")} if isinstance(status, dict) else {}
    trials = [_trial(trial, f"trial_results[{i}]", unknown) for i, trial in enumerate(table.pop("trial_results", ()))]
    job = read_record(JobResult, {**table, "stats": {**counts, **stats}}, unknown=unknown)
    return replace(job, trial_results=tuple(trials)), tuple(unknown)


def _trial(table: Any, where: str, unknown: list[str]) -> TrialResult:
    """Without what dumps compute: the validity, and the policy of errors."""
    if isinstance(table, dict):
        table = {key: value for key, value in _without_policy(table).items() if key != "reward_valid"}
        if isinstance(table.get("step_results"), list):
            table["step_results"] = [_without_policy(step) for step in table["step_results"]]
    return read_record(TrialResult, table, where, unknown)


def _without_policy(table: Any) -> Any:
    error = table.get("exception_info") if isinstance(table, dict) else None
    if not isinstance(error, dict):
        return table
    return {**table, "exception_info": {key: value for key, value in error.items() if key != "policy"}}


def trial_json(trial: TrialResult) -> bytes:
    return to_json(_trial_table(trial))


def job_json(job: JobResult) -> bytes:
    table = plain(replace(job, trial_results=()))
    return to_json({**table, "trial_results": [_trial_table(trial) for trial in job.trial_results]})


def _trial_table(trial: TrialResult) -> dict[str, Any]:
    table = plain(trial)
    table["reward_valid"] = trial.reward_valid
    pairs = [(table, trial), *zip(table.get("step_results", ()), trial.step_results or (), strict=True)]
    for written, record in pairs:
        if record.exception_info is not None:
            written["exception_info"]["policy"] = plain(record.exception_info.policy)
    return table


# ---- rewards and statistics ------------------------------------------------------------------------------------------


def step_rewards(steps: Sequence[StepResult], final: bool) -> Mapping[str, float] | None:
    """A trial's rewards by Harbor's rule: of the last step that ran, or the mean over steps that have a verdict.

    A step that was never reached is in neither; `grade.StepsRun.verdict` has the rule for training.
    """
    if final:
        return steps[-1].verifier_result.rewards if steps and steps[-1].verifier_result else None
    measured = [step.verifier_result.rewards or {} for step in steps if step.verifier_result is not None]
    keys = sorted({key for rewards in measured for key in rewards})
    return {key: sum(rewards.get(key, 0) for rewards in measured) / len(measured) for key in keys} or None


def job_stats(trials: Sequence[TrialResult], n_total_trials: int | None = None, n_retries: int = 0) -> JobStats:
    """The statistics of finished trials; metrics are means."""
    totals = [trial.usage for trial in trials]

    def total(name: str) -> Any:
        known = [getattr(usage, name) for usage in totals if getattr(usage, name) is not None]
        return sum(known) if known else None

    keys = dict.fromkeys(trial.eval_key for trial in trials)
    return JobStats(
        n_completed_trials=len(trials),
        n_errored_trials=sum(bool(trial.exceptions) for trial in trials),
        n_pending_trials=max(0, (n_total_trials or 0) - len(trials)),
        n_cancelled_trials=sum(
            any(error.exception_type == "CancelledError" for error in trial.exceptions) for trial in trials
        ),
        n_retries=n_retries,
        evals={key: _eval_stats([trial for trial in trials if trial.eval_key == key]) for key in keys},
        n_input_tokens=total("n_input_tokens"),
        n_cache_tokens=total("n_cache_tokens"),
        n_output_tokens=total("n_output_tokens"),
        cost_usd=total("cost_usd"),
    )


def _eval_stats(trials: Sequence[TrialResult]) -> EvalStats:
    valid = [trial for trial in trials if trial.reward_valid]
    rewards: dict[str, dict[float, tuple[str, ...]]] = {}
    for trial in valid:
        for key, value in trial.rewards.items():
            names = rewards.setdefault(key, {})
            names[value] = (*names.get(value, ()), trial.trial_name)
    errors: dict[str, tuple[str, ...]] = {}
    for trial in trials:
        for kind in sorted({error.exception_type for error in trial.exceptions}):
            errors[kind] = (*errors.get(kind, ()), trial.trial_name)
    return EvalStats(
        n_trials=len(valid),
        n_errors=sum(bool(trial.exceptions) for trial in trials),
        metrics=(_mean([trial.rewards for trial in valid]),) if valid else (),
        pass_at_k=pass_at_k(trials),
        reward_stats=rewards,
        exception_stats=errors,
    )


def _mean(rewards: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """`mean` of the one reward, or a mean by key where there are several."""
    keys = sorted({key for each in rewards for key in each})
    names = {"mean" if len(keys) == 1 else key: key for key in keys}
    return {name: sum(each.get(key, 0) for each in rewards) / len(rewards) for name, key in names.items()}


def pass_at_k(trials: Sequence[TrialResult]) -> dict[int, float]:
    """Mean over tasks of 1 - C(n-c, k) / C(n, k), for k in 2, 4, 8, ... and 5, 10, ... up to the fewest valid trials of
    a task. Empty unless every valid trial has one reward, which is 0 or 1."""
    passed: dict[str, list[int]] = {}
    for trial in trials:
        if trial.reward_valid:
            if len(trial.rewards) != 1 or not set(trial.rewards.values()) <= {0, 1}:
                return {}
            passed.setdefault(trial.task_name, []).append(int(next(iter(trial.rewards.values()))))
    if not passed:
        return {}
    fewest = min(map(len, passed.values()))
    powers = [2**i for i in range(1, fewest.bit_length()) if 2**i <= fewest]

    def chance(task: Sequence[int], k: int) -> float:
        return 1.0 - math.comb(len(task) - sum(task), k) / math.comb(len(task), k)

    ks = sorted({*powers, *range(5, fewest + 1, 5)})
    return {k: sum(chance(task, k) for task in passed.values()) / len(passed) for k in ks}


# ---- directories -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrialRecord:
    """What a trial's directory holds. logs: other files, by path relative to it (`agent/trajectory.json`,
    `verifier/test-stdout.txt`, `artifacts/manifest.json`, `steps/<name>/verifier/reward.txt`)."""

    result: TrialResult
    task_digest: str
    logs: Mapping[str, bytes] = field(default_factory=dict)


def trial_config(task: Path, trial_name: str, agent: str, model: str | None = None) -> dict[str, Any]:
    """The config.json of a trial that ran a local task."""
    named = {"name": agent} | ({"model_name": model} if model else {})
    return {"schema_version": 1, "task": {"path": str(task)}, "trial_name": trial_name, "agent": named}


def write_job(path: Path, job: JobResult, trials: Sequence[TrialRecord], num_concurrent: int = 1) -> None:
    """Write a job directory. Raises FileExistsError where something is there already."""
    path.mkdir(parents=True)
    agents = {json.dumps(record.result.config.get("agent", {})): None for record in trials}
    tasks = {json.dumps(record.result.config.get("task", {})): None for record in trials}
    config = {
        "schema_version": 1,
        "job_name": path.name,
        "jobs_dir": str(path.parent),
        "n_concurrent_trials": num_concurrent,
        "agents": [json.loads(agent) for agent in agents],
        "tasks": [json.loads(task) for task in tasks],
    }
    lock = {
        "schema_version": 3,
        "created_at": job.started_at,
        "n_concurrent_trials": num_concurrent,
        "retry": {},
        "trials": [_trial_lock(record) for record in trials],
    }
    _write(path / "config.json", to_json(config))
    _write(path / "lock.json", to_json(lock))
    for record in trials:
        folder = path / record.result.trial_name
        _write(folder / "config.json", to_json(record.result.config))
        _write(folder / "lock.json", to_json(_trial_lock(record)))
        for name, content in record.logs.items():
            _write(folder / name, content)
        _write(folder / "result.json", trial_json(record.result))
    _write(path / "result.json", job_json(job))  # last: who finds it finds the rest


def _trial_lock(record: TrialRecord) -> dict[str, Any]:
    """What the trial ran on, resolved: the digest of its task is kept here and nowhere else."""
    config = record.result.config
    task = {"name": record.result.task_name, "type": "local", "digest": record.task_digest}
    path = config.get("task", {}).get("path")
    return {
        "schema_version": 2,
        "task": task | ({"path": path} if path else {}),
        "agent": config.get("agent", {}),
        "environment": config.get("environment", {}),
        "verifier": {"environment_mode": record.result.verifier_environment_mode},
    }


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def read_job(path: Path) -> tuple[JobResult, tuple[TrialRecord, ...]]:
    """A job directory: its result, and its trials in order of name, without their logs. Raises FormatError."""
    job, _ = parse_job(_read(path / "result.json"))
    folders = [folder for folder in sorted(path.iterdir()) if (folder / "result.json").is_file()]
    return job, tuple(read_trial(folder) for folder in folders)


def read_trial(path: Path) -> TrialRecord:
    """A trial directory; the digest is empty where an old one has no lock. Raises FormatError."""
    result, _ = parse_trial(_read(path / "result.json"))
    digest = ""
    if (path / "lock.json").is_file():
        lock = read_json(_read(path / "lock.json"), "lock.json")
        digest = str(lock.get("task", {}).get("digest", "")) if isinstance(lock, dict) else ""
    return TrialRecord(result, digest)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror}") from None
