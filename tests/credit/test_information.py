"""Turn rewards from information: IGPO, TRACE, SIOP."""

import math
from typing import Any

import numpy as np
import pytest

from jaxagent import credit
from tests.credit.cases import (
    batch_of_turns,
    by_turn,
    random_batch,
    run,
    shape_rewards,
    source,
    turns_of,
)

pytestmark = pytest.mark.usefixtures("x64")

NAN = float("nan")


def boundaries(batch: Any, name: str, *rows: list[float]) -> Any:
    """The batch with an extra [E,K+1] of these rows, NaN beyond them."""
    values = np.full((batch.num_episodes, batch.num_turns + 1), NAN)
    for index, row in enumerate(rows):
        values[index, : len(row)] = row
    return batch.with_extra(name, values)


def test_vectors(vectors: dict[str, Any]) -> None:
    batch = batch_of_turns([[1, 2, 1]], [1.0])
    expected = vectors["expected"]["information_gain"]
    given = boundaries(batch, "gold_logprobs", expected["gold_mean_logprobs"])
    shaped = shape_rewards(credit.information_gain(final="gain"), given)
    np.testing.assert_allclose(shaped.turn_rewards[0], expected["turn_rewards"], atol=1e-6)
    expected = vectors["expected"]["log_ratio_td"]
    given = boundaries(batch, "gold_logprobs", expected["gold_sum_logprobs"])
    shaped = shape_rewards(credit.log_ratio_td(), given)
    np.testing.assert_allclose(shaped.turn_rewards[0], expected["turn_rewards"], atol=1e-6)
    assert not shaped.turn_rewards[1:].any()


def test_printed_numbers_of_igpo() -> None:
    # Whatever the environment gave is replaced, so that the outcome is in once.
    batch = batch_of_turns([[1, 2, 1]], [1.0], None, [[0.0, 0.0, 1.0]])
    batch = boundaries(batch, "gold_logprobs", np.log([0.1, 0.3, 0.2, 0.9]).tolist())
    shaped = shape_rewards(credit.information_gain(), batch)
    np.testing.assert_allclose(shaped.turn_rewards[0], [0.2, -0.1, 1.0], atol=1e-12)
    for gamma, wanted in ((1.0, [1.1, 0.9, 1.0]), (0.9, [0.92, 0.8, 1.0])):
        found = by_turn(shaped, run(credit.turn_returns(gamma), shaped))
        np.testing.assert_allclose(found, [wanted], atol=1e-12)


def test_printed_numbers_of_the_released_and_the_recommended_estimator() -> None:
    batch = batch_of_turns([[1, 1], [1, 1]], [1.0, 0.0], None, [[0.2, 1.0], [0.0, 0.0]])
    released = by_turn(batch, run(credit.position_relative(), batch))
    np.testing.assert_allclose(released, [[0.1, 0.5], [-0.1, -0.5]], atol=1e-12)
    recommended = credit.turn_returns(normalise="group_rewards")
    found = by_turn(batch, run(recommended, batch))
    np.testing.assert_allclose(found, [[1.26025, 1.47029], [-1.26025, -0.63013]], atol=1e-5)


def test_printed_numbers_of_trace() -> None:
    batch = batch_of_turns([[1, 1, 1]], [1.0])
    batch = boundaries(batch, "gold_logprobs", [-2, -1, -1, -0.5])
    shaped = shape_rewards(credit.log_ratio_td(), batch)
    np.testing.assert_allclose(shaped.turn_rewards[0], [1, 0, 0.5], atol=1e-12)


def test_printed_numbers_of_siop() -> None:
    batch = batch_of_turns([[1, 1], [1], [1, 1], [1]], [0.0] * 4)
    batch = boundaries(batch, "evidence", [0.1, 0.2, 0.4], [0.3, 0.6], [0.1, 0.2, 0.4], [0.1, 0.9])
    batch = batch.with_extra("outcome_ids", np.asarray([7, 7, -1, 2, 7, 7]))
    shaped = shape_rewards(credit.evidence_gain(), batch)
    # Three answers in the group, two of them the same.
    np.testing.assert_allclose(
        shaped.turn_rewards[0], 2 / 3 * np.asarray([math.log(2), math.log(2) + 0.5]), atol=1e-6
    )
    np.testing.assert_allclose(shaped.turn_rewards[1], [1 / 3, 0])  # a single turn
    assert not shaped.turn_rewards[2].any()  # no answer
    np.testing.assert_allclose(shaped.turn_rewards[3], [1 / 6, 0])
    half = batch.with_extra("outcome_ids", np.asarray([7, 3, -1, -1, 7, 7]))
    shaped = shape_rewards(credit.evidence_gain(), half)
    np.testing.assert_allclose(shaped.turn_rewards[0], [0.3465736, 0.5965736], atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_gains_match_a_loop(seed: int) -> None:
    batch = random_batch(seed)
    gold = batch.extras["gold_logprobs"]
    turns = turns_of(batch)
    for transform, formula in (
        (
            credit.information_gain("gain"),
            lambda e, k: math.exp(gold[e, k + 1]) - math.exp(gold[e, k]),
        ),
        (
            credit.information_gain(),
            lambda e, k: (
                batch.rewards[e]
                if k == max(turns[e])
                else math.exp(gold[e, k + 1]) - math.exp(gold[e, k])
            ),
        ),
        (
            credit.log_ratio_td(0.9),
            lambda e, k: 0.9 * (gold[e, k + 1] - gold[e, 0]) - (gold[e, k] - gold[e, 0]),
        ),
    ):
        shaped = shape_rewards(transform, batch)
        wanted = np.zeros(batch.turn_rewards.shape)
        for e, own in turns.items():
            for k in own:
                wanted[e, k] = formula(e, k)
        np.testing.assert_allclose(shaped.turn_rewards, wanted, atol=1e-12)


def test_log_ratio_rewards_telescope() -> None:
    tokens = [[1, 2, 1, 1], [2], [1, 1]]
    rng = np.random.default_rng(0)
    rows = [(-rng.exponential(size=len(own) + 1)).tolist() for own in tokens]
    batch = boundaries(batch_of_turns(tokens, [1.0, 0.0, 0.0]), "gold_logprobs", *rows)
    shaped = shape_rewards(credit.log_ratio_td(), batch)
    sums = shaped.turn_rewards.sum(axis=1)
    np.testing.assert_allclose(sums[:3], [row[-1] - row[0] for row in rows], atol=1e-12)


@pytest.mark.parametrize("eta", [0.0, 1.5])
@pytest.mark.parametrize("seed", range(3))
def test_evidence_gain_matches_a_loop(seed: int, eta: float) -> None:
    batch = random_batch(seed)
    evidence, answers = batch.extras["evidence"], batch.extras["outcome_ids"]
    wanted = np.zeros(batch.turn_rewards.shape)
    for e, turns in turns_of(batch).items():
        answered = [
            f
            for f in np.flatnonzero(batch.valid)
            if batch.group_ids[f] == batch.group_ids[e] and answers[f] >= 0
        ]
        if answers[e] < 0:
            continue
        weights = {}
        for answer in {int(answers[f]) for f in answered}:
            members = [f for f in answered if answers[f] == answer]
            support = np.mean(batch.extras["support"][members])
            weights[answer] = len(members) / len(answered) * math.exp(eta * support)
        q = weights[int(answers[e])] / sum(weights.values())
        for k in turns:
            if len(turns) > 1:
                before, after = evidence[e, k] + 1e-8, evidence[e, k + 1] + 1e-8
                wanted[e, k] = q * (math.log(after) - math.log(before))
            if k == max(turns):
                wanted[e, k] += 0.3 * q
    shaped = shape_rewards(credit.evidence_gain(0.3, eta), batch)
    np.testing.assert_allclose(shaped.turn_rewards, wanted, atol=1e-10)
    assert np.abs(wanted).max() > 0.1


@pytest.mark.parametrize("seed", range(3))
def test_position_relative_matches_a_loop(seed: int) -> None:
    batch = random_batch(seed)
    given = source(batch, "turns")
    # Each valid episode as one line of (turn, is action, where) after its prompts.
    lines: dict[int, list[tuple[int, bool, tuple[int, int]]]] = {}
    for e in np.flatnonzero(batch.valid):
        found = []
        for r, t in zip(*np.nonzero(batch.episode_ids == e), strict=True):
            if batch.turn_ids[r, t] >= 0:
                found.append((int(batch.turn_ids[r, t]), int(batch.positions[r, t]), r, t))
        lines[int(e)] = [(k, batch.kind[r, t] == 2, (r, t)) for k, _, r, t in sorted(found)]
    wanted = np.zeros(batch.tokens.shape)
    for e, line in lines.items():
        mates = [f for f in lines if batch.group_ids[f] == batch.group_ids[e]]
        for place, (turn, acts, at) in enumerate(line):
            if acts:
                others = [
                    given[f][lines[f][place][0]]
                    for f in mates
                    if place < len(lines[f]) and lines[f][place][1]
                ]
                wanted[at] = given[e][turn] - sum(others) / len(mates)
    np.testing.assert_allclose(run(credit.position_relative(), batch), wanted, atol=1e-10)
    assert np.abs(wanted).max() > 0.1


def test_position_relative_of_equal_rewards_is_exactly_zero() -> None:
    batch = batch_of_turns([[2], [2], [2]], [0.1] * 3, None, [[0.1]] * 3)
    small = batch.replace(turn_rewards=batch.turn_rewards.astype(np.float32))
    assert not run(credit.position_relative(), small).any()


def test_missing_and_misshapen_extras_are_named() -> None:
    batch = batch_of_turns([[1, 1]], [1.0])
    for transform, name in (
        (credit.information_gain(), "gold_logprobs"),
        (credit.log_ratio_td(), "gold_logprobs"),
        (credit.evidence_gain(), "evidence"),
    ):
        with pytest.raises(ValueError, match=f"needs the extra {name}"):
            transform(batch)
        with pytest.raises(ValueError, match=r"shape \[E,K\+1\] = \(3, 3\)"):
            transform(batch.with_extra(name, np.zeros((3, 2))))
    batch = batch.with_extra("evidence", np.ones((3, 3)))
    with pytest.raises(ValueError, match="needs the extra outcome_ids"):
        credit.evidence_gain()(batch)
    batch = batch.with_extra("outcome_ids", np.zeros(3, int))
    with pytest.raises(ValueError, match="needs the extra support"):
        credit.evidence_gain(eta=1.0)(batch)


def test_misuse_fails_at_construction() -> None:
    for make, message in (
        (lambda: credit.information_gain("last"), "final must be"),  # type: ignore[arg-type]
        (lambda: credit.position_relative("all"), "rewards must be"),  # type: ignore[arg-type]
        (lambda: credit.log_ratio_td(0.0), "gamma must lie"),
        (lambda: credit.evidence_gain(1.5), "outcome_weight must lie"),
        (lambda: credit.evidence_gain(eta=-1.0), "eta must"),
        (lambda: credit.evidence_gain(floor=0.0), "floor must"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
