import pytest

from rsi.rewards import Outcome, RewardConfig, proposer_reward, solver_reward
from rsi.types import Verdict


@pytest.mark.parametrize(
    "outcome, reward",
    [("broken", -1.0), ("duplicate", -1.0), ("rejected", -0.25), ("admitted", 1.0), ("unmeasured", None)],
)
def test_a_proposal_earns_the_papers_table(outcome: Outcome, reward: float | None) -> None:
    assert proposer_reward(outcome) == reward


def test_the_table_can_be_configured_but_a_fault_never_earns() -> None:
    config = RewardConfig(invalid=-2.0, uncalibrated=0.0, admitted=3.0)
    rewards = [proposer_reward(outcome, config) for outcome in ("broken", "rejected", "admitted", "unmeasured")]
    assert rewards == [-2.0, 0.0, 3.0, None]


@pytest.mark.parametrize("reward", [1.0, 0.0, 1 / 3, None])
def test_a_solver_earns_what_the_verifier_wrote_and_a_fault_nothing(reward: float | None) -> None:
    assert solver_reward(Verdict(reward)) == reward
