"""Centred advantages, dropped groups, and trajectories laid flat."""

import pytest

from rsi.advantages import centred, flatten, is_useful, to_samples
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
