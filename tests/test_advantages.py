"""Centred advantages, dropped groups, and trajectories laid flat."""

import pytest

from rsi.advantages import (
    AdvantageConfig,
    Estimator,
    centred,
    flatten,
    is_useful,
    leave_one_out,
    overlong_penalty,
    standardised,
    to_samples,
)
from rsi.types import Attempt, Group, Role, Stop, Trajectory, Turn, Verdict


def trajectory(name: str, role: Role = "solver", stop: Stop = Stop.DONE, sampled: tuple[int, ...] = (7,)) -> Trajectory:
    return Trajectory(name, "task", role, (Turn((1, 2), sampled, (-0.5,) * len(sampled), 3, 3),), stop)


def group(role: Role, rewards: tuple[float, ...], stop: Stop = Stop.DONE) -> Group:
    attempts = tuple(Attempt(trajectory(f"{role}{i}", role, stop), Verdict(reward)) for i, reward in enumerate(rewards))
    return Group(role, "key", attempts, rewards)


def test_advantage_is_reward_minus_the_groups_mean():
    assert centred([1, 0.5, 0, 0]) == (0.625, 0.125, -0.375, -0.375)


def test_a_group_of_one_gets_zero():
    assert centred([0.7]) == (0.0,)


def test_roles_never_share_a_mean():
    samples = to_samples([group("solver", (1, 0.5, 0, 0)), group("proposer", (1, -0.25, -1, 1))])
    assert [s.advantage for s in samples if s.role == "solver"] == [0.625, 0.125, -0.375, -0.375]
    assert [s.advantage for s in samples if s.role == "proposer"] == [0.8125, -0.4375, -1.1875, 0.8125]


def test_groups_without_variance_are_dropped():
    assert not is_useful(group("solver", (0.5, 0.5, 0.5)))
    assert not is_useful(group("solver", (0.5, 0.5 + 1e-7)))
    assert not is_useful(group("solver", (1.0,)))
    assert is_useful(group("solver", (0.5, 0.51)))
    assert to_samples([group("solver", (1, 1)), group("solver", (0, 1))])[0].advantage == -0.5


def test_a_silent_attempt_counts_in_the_mean_only():
    mute = Attempt(trajectory("mute", sampled=()), Verdict(0.0))
    spoke = Attempt(trajectory("spoke"), Verdict(1.0))
    samples = to_samples([Group("solver", "key", (mute, spoke), (0.0, 1.0))])
    assert [s.advantage for s in samples] == [0.5]


def test_a_fault_in_a_group_is_refused():
    with pytest.raises(ValueError, match="leave faults out"):
        to_samples([group("solver", (0, 1), Stop.FAULT)])


def test_a_reward_that_is_not_a_number_is_refused():
    with pytest.raises(ValueError, match="finite"):
        centred([1.0, float("nan")])


def test_flatten_keeps_turns_in_order_and_masks_what_was_sampled():
    turns = (Turn((1, 2), (3, 4), (-0.1, -0.2), 5, 5), Turn((6,), (7,), (-0.3,), 6, 6))
    sample = flatten(Trajectory("t", "task", "solver", turns, Stop.DONE), 0.25)
    assert sample.tokens == (1, 2, 3, 4, 6, 7)
    assert sample.mask == (False, False, True, True, False, True)
    assert sample.logprobs == (0.0, 0.0, -0.1, -0.2, 0.0, -0.3)
    assert (sample.advantage, sample.version) == (0.25, 5)


def test_flatten_refuses_a_turn_without_all_its_logprobs():
    turn = Turn((1,), (2, 3), (-0.1,), 0, 0)
    with pytest.raises(ValueError, match="one for each"):
        flatten(Trajectory("t", "task", "solver", (turn,), Stop.DONE), 1.0)


def test_leave_one_out_compares_with_the_others():
    assert leave_one_out([1, 0.5, 0, 0]) == pytest.approx((0.83333, 0.16667, -0.5, -0.5), abs=1e-5)
    assert leave_one_out([0.7]) == (0.0,)


def test_division_by_std_says_which_std():
    rewards = [1, 0.5, 0, 0]
    assert standardised(rewards) == pytest.approx((1.50756, 0.30151, -0.90453, -0.90453), abs=1e-5)
    assert standardised(rewards, sample=True) == pytest.approx((1.30558, 0.26112, -0.78335, -0.78335), abs=1e-5)
    assert standardised([0.5, 0.5]) == standardised([0.5, 0.5], sample=True) == (0.0, 0.0)


def test_the_recipe_names_the_estimator():
    rewards = (1, 0.5, 0, 0)
    expected: dict[Estimator, float] = {"centred": 0.625, "leave_one_out": 0.8333, "std": 1.5076, "std_sample": 1.3056}
    for name, advantage in expected.items():
        [first, *_] = to_samples([group("solver", rewards)], AdvantageConfig(estimator=name))
        assert first.advantage == pytest.approx(advantage, abs=1e-4)


def test_roles_are_weighed_apart_and_a_weight_of_zero_leaves_a_role_out():
    groups = [group("solver", (1, 0)), group("proposer", (1, -1))]
    samples = to_samples(groups, AdvantageConfig(solver_weight=2.0, proposer_weight=0.5))
    assert [s.advantage for s in samples] == [1.0, -1.0, 0.5, -0.5]
    only = to_samples(groups, AdvantageConfig(proposer_weight=0.0))
    assert {s.role for s in only} == {"solver"}


@pytest.mark.parametrize(("length", "penalty"), [(80, 0.0), (90, -0.5), (100, -1.0), (101, -1.0)])
def test_overlong_attempts_lose_up_to_a_point(length: int, penalty: float):
    assert overlong_penalty(length, 100, 20) == pytest.approx(penalty)


def test_the_overlong_penalty_shapes_the_solvers_rewards_only():
    def of(role: Role) -> Group:
        lengths = (80, 90, 100, 80)
        attempts = tuple(Attempt(trajectory(f"{n}", role, sampled=(7,) * n), Verdict(1.0)) for n in lengths)
        return Group(role, "key", attempts, (1.0, 1.0, 1.0, 0.0))

    config = AdvantageConfig(overlong_limit=100, overlong_buffer=20)
    solver = to_samples([of("solver")], config)
    assert [s.advantage for s in solver] == pytest.approx([0.625, 0.125, -0.375, -0.375])  # of 1, .5, 0, 0
    assert [s.advantage for s in to_samples([of("proposer")], config)] == [0.25, 0.25, 0.25, -0.75]


def test_a_truncated_attempt_is_graded_masked_or_dropped():
    attempts = tuple(
        Attempt(trajectory(str(i), stop=stop), Verdict(reward))
        for i, (stop, reward) in enumerate([(Stop.DONE, 1.0), (Stop.MAX_TOKENS, 0.0), (Stop.DONE, 0.5)])
    )
    groups = [Group("solver", "key", attempts, (1.0, 0.0, 0.5))]
    configs = [AdvantageConfig(truncated="grade"), AdvantageConfig(truncated="mask"), AdvantageConfig(truncated="drop")]
    advantages = [[s.advantage for s in to_samples(groups, config)] for config in configs]
    assert advantages == [[0.5, -0.5, 0.0], [0.5, 0.0], [0.25, -0.25]]


@pytest.mark.parametrize("bad", [{"solver_weight": -1.0}, {"overlong_limit": 10}, {"overlong_buffer": 3}])
def test_advantage_settings_that_mean_nothing_are_refused(bad: dict):
    with pytest.raises(ValueError, match="use|set"):
        AdvantageConfig(**bad)
