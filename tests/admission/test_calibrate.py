import asyncio

import pytest

from rsi.admission.calibrate import CalibrateConfig, calibrate, decide
from rsi.types import Attempt, Stop, Trajectory, Verdict

CONFIG = CalibrateConfig()


def attempt(i: int, reward: float | None) -> Attempt:
    return Attempt(Trajectory(str(i), "sha256:0", "solver", (), Stop.DONE), Verdict(reward))


@pytest.mark.parametrize(
    "rewards, decision",
    [
        ([0, 0, 0, 0], "too_hard"),
        ([1, 1, 1, 1], "too_easy"),
        ([1, 0, 1, 0], "accept"),
        ([1, 0, 0, 0], "extend"),
        ([1, 1, 1, 0], "extend"),
        ([0.5, 0.5, 0.5, 0.5], "no_spread"),
        ([0.37, 0.5, 0.5, 0.63], "no_spread"),  # population std 0.0919, the sample's 0.1061
        ([0.2, 0.0, 0.0, 0.0], "too_hard"),  # mean 0.05: more than 0.15 from the edge
        ([1.0, 1.0, 1.0, 0.8], "too_easy"),
        ([0.4, 0.4, 0.4, 0.4], "extend"),  # mean 0.4, at the margin
        ([0.6, 0.2, 0.6, 0.24], "accept"),  # mean 0.41, past the margin
        ([1, 0, 0, 0, 0, 0, 0, 0], "too_hard"),
        ([1, 1, 0, 0, 0, 0, 0, 0], "accept"),  # mean 0.25: the edge is in the band
        ([1, 1, 1, 1, 1, 1, 0, 0], "accept"),
        ([1, 1, 1, 1, 1, 1, 1, 0], "too_easy"),
        ([0.25] * 8, "no_spread"),
        ([0, 0, 0, 0, 0, 0, 0, 0], "too_hard"),
    ],
)
def test_decisions_follow_the_papers_band(rewards: list[float], decision: str) -> None:
    assert decide(rewards, CONFIG) == decision


def run(rewards: dict[int, float | None], config: CalibrateConfig = CONFIG):
    """Calibrate by a table of draws; returns the calibration and the draws that were made. A None is a fault."""
    drawn: list[int] = []

    async def draw(i: int) -> Attempt | None:
        drawn.append(i)
        await asyncio.sleep(0)
        reward = rewards.get(i)
        return None if reward is None and i % 2 else attempt(i, reward)

    return asyncio.run(calibrate(draw, config)), drawn


def test_four_attempts_settle_a_clear_task() -> None:
    calibration, drawn = run({0: 1, 1: 0, 2: 1, 3: 0})
    assert (calibration.decision, calibration.mean, calibration.std) == ("accept", 0.5, 0.5)
    assert drawn == [0, 1, 2, 3] and len(calibration.attempts) == 4


def test_a_mean_near_an_edge_is_extended_to_eight() -> None:
    calibration, drawn = run({0: 1, 1: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 0, 7: 0})
    assert (calibration.decision, calibration.mean) == ("accept", 0.375)
    assert drawn == list(range(8))


def test_faults_are_drawn_again_and_are_no_rewards() -> None:
    # Draw 1 gives nothing, draw 2 a verdict without a reward: both are faults.
    calibration, drawn = run({0: 1, 3: 0, 4: 1, 5: 0})
    assert calibration.rewards == (1, 0, 1, 0) and calibration.decision == "accept"
    assert drawn == [0, 1, 2, 3, 4, 5]


def test_too_many_faults_leave_the_task_unmeasured() -> None:
    calibration, drawn = run({0: 1})
    assert calibration.decision == "unmeasured"
    assert calibration.rewards == (1,) and len(drawn) == 7  # 4, then 3 more: 6 faults, and 4 are allowed


def test_attempts_of_a_round_run_at_the_same_time() -> None:
    async def main() -> str:
        barrier = asyncio.Barrier(4)

        async def draw(i: int) -> Attempt | None:
            await barrier.wait()  # never passed by one at a time
            return attempt(i, float(i % 2))

        return (await asyncio.wait_for(calibrate(draw, CONFIG), 10)).decision

    assert asyncio.run(main()) == "accept"


def test_an_error_of_an_attempt_is_raised_after_the_others_have_ended() -> None:
    ended: list[int] = []

    async def draw(i: int) -> Attempt | None:
        if i == 0:
            raise RuntimeError("ours")
        await asyncio.sleep(0.01)
        ended.append(i)
        return attempt(i, 1.0)

    with pytest.raises(RuntimeError, match="ours"):
        asyncio.run(calibrate(draw, CONFIG))
    assert ended == [1, 2, 3]


def test_a_configuration_that_decides_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="attempts=9"):
        CalibrateConfig(attempts=9)
    with pytest.raises(ValueError, match="low=0.8"):
        CalibrateConfig(low=0.8)


def run_hinted(rewards: list[float], hinted: float | None, config: CalibrateConfig = CONFIG):
    """As `run`, with a diagnostic attempt that earns `hinted`; how often it was run."""
    asked = 0

    async def draw(i: int) -> Attempt:
        return attempt(i, rewards[i])

    async def draw_hinted() -> Attempt | None:
        nonlocal asked
        asked += 1
        return None if hinted is None else attempt(99, hinted)

    return asyncio.run(calibrate(draw, config, draw_hinted)), asked


def test_a_task_that_is_too_hard_gets_one_diagnostic_attempt_that_counts_for_nothing_else() -> None:
    calibration, asked = run_hinted([0, 0, 0, 0], 1.0)
    assert (calibration.decision, calibration.hinted, calibration.rewards, asked) == ("too_hard", 1.0, (0, 0, 0, 0), 1)


def test_a_task_in_the_band_or_too_easy_gets_none() -> None:
    assert run_hinted([1, 0, 1, 0], 1.0)[1] == run_hinted([1, 1, 1, 1], 1.0)[1] == 0
    assert run_hinted([0, 0, 0, 0], 1.0, CalibrateConfig(hinted=False))[1] == 0


def test_a_fault_in_the_diagnostic_attempt_leaves_the_decision() -> None:
    calibration, asked = run_hinted([0, 0, 0, 0], None)
    assert (calibration.decision, calibration.hinted, asked) == ("too_hard", None, 1)


def test_the_interval_is_wilsons() -> None:
    calibration, _ = run({0: 1, 1: 0, 2: 1, 3: 0})
    assert calibration.ci95 == pytest.approx((0.1500, 0.8500), abs=1e-3)
