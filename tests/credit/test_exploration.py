"""Exploration bonuses, the stopping threshold, stages of a demonstration."""

from typing import Any

import numpy as np
import pytest

from jaxagent import credit
from tests.credit.cases import batch_of_turns, random_batch, run, shape_rewards

pytestmark = pytest.mark.usefixtures("x64")


def test_printed_numbers_of_the_historical_bonus() -> None:
    counts = credit.count_outcomes({}, ["x"] * 4 + ["y"], ["a", "a", "a", "b", "a"])
    assert counts == {("x", "a"): 3, ("x", "b"): 1, ("y", "a"): 1}
    more = credit.count_outcomes(counts, ["x", "x"], ["a", None])
    assert more[("x", "a")] == 4 and counts[("x", "a")] == 3 and len(more) == 3
    found = credit.historical_bonus(more, ["x", "x", "y", "z"], ["a", None, "a", "new"], 0.1)
    np.testing.assert_allclose(found, [0.05, 0.0, 0.1, 0.1], atol=1e-12)
    centred = credit.historical_bonus(
        more, ["x", "x", "x", "y"], ["a", "b", None, "a"], 0.1, groups=[3, 3, 3, 5]
    )
    np.testing.assert_allclose(centred, [-0.025, 0.025, 0.0, 0.0], atol=1e-12)


def test_a_bonus_goes_to_valid_episodes_only() -> None:
    batch = batch_of_turns([[1]] * 3, [1.0, 0.0, 0.5], valid=[True, False, True])
    found = credit.with_bonus(batch, [0.25, 9.0, -0.5])
    np.testing.assert_allclose(found.rewards, [1.25, 0, 0, 0, 0])
    np.testing.assert_allclose(batch.rewards, [1, 0, 0.5, 0, 0])
    for bad in (np.zeros(6), np.zeros((2, 2))):
        with pytest.raises(ValueError, match="bonus must be"):
            credit.with_bonus(batch, bad)


def test_printed_numbers_of_the_batch_bonus() -> None:
    batch = batch_of_turns([[1]] * 6, [1.0] * 6, [0, 0, 0, 0, 1, 1])
    batch = batch.with_extra("outcome_ids", np.asarray([2, 2, 5, 2, 2, -1, 2, 2]))
    shaped = shape_rewards(credit.batch_bonus(1.0), batch)
    np.testing.assert_allclose(shaped.rewards, [0.5, 0.5, 1.0, 0.5, 1, 1, 0, 0], atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_the_batch_bonus_matches_a_loop(seed: int) -> None:
    batch = random_batch(seed)
    outcomes = batch.extras["outcome_ids"]
    wanted = batch.rewards.copy()
    for e in np.flatnonzero(batch.valid):
        mates = [f for f in np.flatnonzero(batch.valid) if batch.group_ids[f] == batch.group_ids[e]]
        same = [f for f in mates if f != e and outcomes[f] == outcomes[e]]
        if outcomes[e] >= 0:
            wanted[e] -= 0.3 * len(same) / len(mates)
    shaped = shape_rewards(credit.batch_bonus(0.3), batch)
    np.testing.assert_allclose(shaped.rewards, wanted, atol=1e-12)
    assert not np.allclose(wanted, batch.rewards)


def test_a_bonus_comes_before_the_normalisation() -> None:
    batch = batch_of_turns([[1]] * 3, [0.0] * 3)
    batch = batch.with_extra("outcome_ids", np.asarray([0, 0, 1, -1, -1]))
    assert not run(credit.group_relative(), batch).any()
    found = run(credit.group_relative(), shape_rewards(credit.batch_bonus(0.1), batch))
    assert found.max() > 1 and found.min() < -0.5


def test_stages_of_a_demonstration() -> None:
    steps = ["ls", "cd", "cat", "done"]
    assert [len(credit.demonstration_prefix(steps, j)) for j in range(5)] == [4, 3, 2, 1, 0]
    assert credit.demonstration_prefix(steps, 1) == ["ls", "cd", "cat"]
    groups = credit.stage_groups(["a", "a", "b", "a"], [1, 2, 1, 1])
    assert groups[0] == groups[3] and len(set(groups)) == 3
    with pytest.raises(ValueError, match=r"stage must lie in 0\.\.4"):
        credit.demonstration_prefix(steps, 5)


def test_misuse_is_named() -> None:
    batch: Any = batch_of_turns([[1]], [1.0])
    for make, message in (
        (lambda: credit.historical_bonus({}, [], [], 0.0), "scale must"),
        (lambda: credit.historical_bonus({}, ["x"], ["a"], 1.0, groups=[]), "but 0 groups"),
        (lambda: credit.batch_bonus(-1.0), "scale must"),
        (lambda: credit.batch_bonus(1.0)(batch), "needs the extra outcome_ids"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
