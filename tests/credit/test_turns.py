"""Turn sums, turn returns and generalised advantage estimation."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxagent import credit
from jaxagent.data.batch import per_turn_token, turn_mask, turn_sum
from tests.credit.cases import (
    batch_of_turns,
    by_turn,
    lay_tokens,
    lay_turns,
    random_batch,
    returns,
    run,
    source,
    turns_of,
    zscore,
)

pytestmark = pytest.mark.usefixtures("x64")

SOURCES = ("turns", "outcome", "both")


@pytest.mark.parametrize("seed", range(2))
def test_turn_sums_and_their_spread(seed: int) -> None:
    batch = random_batch(seed)
    values = np.random.default_rng(seed).normal(size=batch.tokens.shape)
    sums = np.zeros(batch.turn_rewards.shape)
    spread = np.zeros(batch.tokens.shape)
    table = np.random.default_rng(seed).normal(size=sums.shape)
    for r, t in np.ndindex(*values.shape):
        e, k = batch.episode_ids[r, t], batch.turn_ids[r, t]
        if e < batch.num_episodes and k >= 0:
            sums[e, k] += values[r, t]
            spread[r, t] = table[e, k]
    np.testing.assert_allclose(turn_sum(batch, values), sums, atol=1e-12)
    np.testing.assert_array_equal(per_turn_token(batch, table), spread)
    exists = np.zeros(sums.shape, bool)
    for e, turns in turns_of(batch).items():
        exists[e, list(turns)] = True
    np.testing.assert_array_equal(turn_mask(batch), exists)


def test_extras_must_name_every_episode() -> None:
    batch = batch_of_turns([[1]], [1.0])
    added = batch.with_extra("meter", np.zeros((3, 2)))
    assert set(added.extras) == {"meter"} and not batch.extras
    with pytest.raises(ValueError, match=r"'meter' has shape \(2, 2\).*3 episodes"):
        batch.with_extra("meter", np.zeros((2, 2)))
    with pytest.raises(ValueError, match="leading axis"):
        batch.with_extra("meter", np.zeros(()))


def test_turn_returns_match_the_vectors(vectors: dict[str, Any]) -> None:
    wanted = vectors["expected"]["turn_returns_gamma0.9"]
    tokens = [[2, 1, 3], [1, 2], [1, 1, 1], [3, 1]]
    batch = batch_of_turns(tokens, vectors["reward"], vectors["group"], wanted["turn_rewards"])
    plain = by_turn(batch, run(credit.turn_returns(0.9), batch))
    pooled = by_turn(batch, run(credit.turn_returns(0.9, "group"), batch))
    for index in range(4):
        np.testing.assert_allclose(plain[index], wanted["returns"][index], atol=1e-6)
        np.testing.assert_allclose(pooled[index], wanted["normalised_by_group"][index], atol=1e-5)


def test_printed_numbers_of_gtpo_and_of_the_rewards_normalised_first() -> None:
    batch = batch_of_turns([[1, 2], [2, 1]], [1.0, 0.0], None, [[0.0, 1.0], [0.0, 0.0]])
    plain = by_turn(batch, run(credit.turn_returns(0.9), batch))
    np.testing.assert_allclose(plain, [[0.9, 1.0], [0.0, 0.0]], atol=1e-12)
    pooled = by_turn(batch, run(credit.turn_returns(0.9, "group"), batch))
    np.testing.assert_allclose(pooled, [[0.77273, 0.95455], [-0.86364, -0.86364]], atol=1e-5)
    batch = batch_of_turns([[1, 2], [2, 1]], [1.0, 0.0], None, [[0.2, 1.0], [0.0, 0.0]])
    first = by_turn(batch, run(credit.turn_returns(1.0, "group_rewards"), batch))
    np.testing.assert_allclose(first, [[1.26025, 1.47029], [-1.26025, -0.63013]], atol=1e-5)


def test_the_outcome_is_in_once() -> None:
    batch = batch_of_turns([[1, 1]], [1.0], None, [[0.25, 0.75]])
    for rewards, wanted in (("turns", [1, 0.75]), ("outcome", [1, 1]), ("both", [2, 1.75])):
        found = run(credit.turn_returns(rewards=rewards), batch)  # type: ignore[arg-type]
        np.testing.assert_allclose(by_turn(batch, found), [wanted])


@pytest.mark.parametrize("rewards", SOURCES)
@pytest.mark.parametrize("normalise", ["none", "group", "group_rewards"])
@pytest.mark.parametrize("seed", range(2))
def test_turn_returns_match_a_loop(seed: int, normalise: Any, rewards: Any) -> None:
    batch = random_batch(seed)
    given = source(batch, rewards)

    def pooled(values: dict[int, dict[int, float]]) -> dict[int, dict[int, float]]:
        out = {}
        for e in values:
            mates = [f for f in values if batch.group_ids[f] == batch.group_ids[e]]
            mean, std = zscore([x for f in mates for x in values[f].values()])
            out[e] = {k: (x - mean) / std for k, x in values[e].items()}
        return out

    if normalise == "group_rewards":
        given = pooled(given)
    wanted = {e: returns(own, 0.9) for e, own in given.items()}
    if normalise == "group":
        wanted = pooled(wanted)
    found = run(credit.turn_returns(0.9, normalise, rewards), batch)
    assert np.abs(found).max() > 0.1
    np.testing.assert_allclose(found, lay_turns(batch, lambda e, k: wanted[e][k]), atol=1e-10)


@pytest.mark.parametrize("normalise", ["group", "group_rewards"])
def test_a_shift_of_the_outcome_does_not_matter(normalise: Any) -> None:
    # One turn each: with several, a shift of the rewards is a different task.
    tokens, rewards, groups = [[2], [1], [3], [1], [1]], [0.1, 0.9, 0.4, 1.0, 1.0], [0, 0, 0, 1, 2]
    found = [
        run(
            credit.turn_returns(normalise=normalise, rewards="outcome"),
            batch_of_turns(tokens, [r + c for r in rewards], groups),
        )
        for c in (0.0, 5.0)
    ]
    assert np.abs(found[0]).max() > 1
    np.testing.assert_allclose(found[1], found[0], atol=1e-9)


def test_gae_matches_the_vectors(vectors: dict[str, Any]) -> None:
    wanted = vectors["expected"]["gae_gamma0.99_lambda0.95"]
    for tokens in ([[3]], [[1, 1, 1]], [[2, 1]]):
        batch = batch_of_turns(tokens, [wanted["rewards"][-1]], truncated=[True])
        batch = batch.with_score("values", lay_tokens(batch, [wanted["values"]]))
        found = run(credit.gae(0.99, 0.95), batch)
        expected = lay_tokens(batch, [wanted["advantages"]], 0.0)
        np.testing.assert_allclose(found, expected, atol=1e-6)
        batch = batch.with_extra("last_values", np.asarray([0.6, np.nan, np.nan]))
        found = run(credit.gae(0.99, 0.95, bootstrap=True), batch)
        expected = lay_tokens(batch, [wanted["advantages_bootstrapped_0.6"]], 0.0)
        np.testing.assert_allclose(found, expected, atol=1e-6)
        ended = batch.replace(truncated=np.zeros(3, bool))
        np.testing.assert_allclose(
            run(credit.gae(0.99, 0.95, bootstrap=True), ended),
            lay_tokens(batch, [wanted["advantages"]], 0.0),
            atol=1e-6,
        )


def test_printed_numbers_of_gae_skip_observations() -> None:
    batch = batch_of_turns([[1, 1]], [1.0])
    batch = batch.with_score("values", lay_tokens(batch, [[0.5, 0.6]]))
    for lam, wanted in ((1.0, [0.5, 0.4]), (0.95, [0.48, 0.4])):
        found = run(credit.gae(1.0, lam), batch)
        np.testing.assert_allclose(found, lay_tokens(batch, [wanted], 0.0), atol=1e-12)
    targets = credit.value_targets(batch)
    np.testing.assert_allclose(targets, lay_tokens(batch, [[1, 1]], 0.0), atol=1e-12)


@pytest.mark.parametrize("rewards", SOURCES)
@pytest.mark.parametrize("bootstrap", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_gae_matches_a_loop(seed: int, bootstrap: bool, rewards: Any) -> None:
    batch = random_batch(seed)
    gamma, lam = 0.97, 0.8
    wanted = np.zeros(batch.tokens.shape)
    targets = np.zeros(batch.tokens.shape)
    values = batch.scores["values"]
    for e, turns in turns_of(batch).items():
        cut = bootstrap and batch.truncated[e]
        given = source(
            batch.replace(rewards=np.zeros_like(batch.rewards)) if cut else batch, rewards
        )
        line = [(k, at) for k, tokens in turns.items() for at in tokens]
        later, after = 0.0, batch.extras["last_values"][e] if cut else 0.0
        for k, at in reversed(line):
            reward = given[e][k] if at == turns[k][-1] else 0.0
            later = reward + gamma * after - values[at] + gamma * lam * later
            wanted[at], targets[at] = later, later + values[at]
            after = values[at]
    assert batch.truncated[batch.valid].any() and not batch.truncated[batch.valid].all()
    found = run(credit.gae(gamma, lam, rewards=rewards, bootstrap=bootstrap), batch)
    np.testing.assert_allclose(found, wanted, atol=1e-10)
    given = credit.value_targets(batch, gamma, lam, rewards, bootstrap)
    np.testing.assert_allclose(given, targets, atol=1e-10)
    mask = wanted != 0
    white = run(credit.gae(gamma, lam, True, rewards, bootstrap), batch)
    own = wanted[mask]
    np.testing.assert_allclose(white[mask], (own - own.mean()) / np.sqrt(own.var(ddof=1) + 1e-8))
    assert not white[~mask].any()


def test_long_episodes_are_as_exact_in_float32() -> None:
    batch = batch_of_turns([[15, 10]], [1.0])
    values = lay_tokens(batch, [np.linspace(0, 1, 25).tolist()], 0.0)
    exact = run(credit.gae(0.99, 0.95), batch.with_score("values", values))
    with jax.enable_x64(False):
        small = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == float else x, batch)
        found = run(credit.gae(0.99, 0.95), small.with_score("values", values.astype(np.float32)))
    np.testing.assert_allclose(found, exact, atol=1e-5)


def test_whitening_one_token_gives_zero() -> None:
    batch = batch_of_turns([[1]], [1.0]).with_score("values", np.zeros((1, 32)))
    assert not run(credit.gae(whiten=True), batch).any()
    nobody = batch.replace(valid=np.zeros(3, bool))
    assert not run(credit.gae(whiten=True), nobody).any()


def test_misuse_fails_at_construction() -> None:
    for make, message in (
        (lambda: credit.turn_returns(1.1), "gamma must lie"),
        (lambda: credit.turn_returns(normalise="pooled"), "normalise must be"),  # type: ignore[arg-type]
        (lambda: credit.turn_returns(rewards="all"), "rewards must be"),  # type: ignore[arg-type]
        (lambda: credit.turn_returns(eps=0.0), "eps must"),
        (lambda: credit.gae(lam=-0.1), "lam must lie"),
        (lambda: credit.gae(gamma=float("nan")), "gamma must lie"),
        (lambda: credit.gae(rewards="none"), "rewards must be"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=message):
            make()
    assert credit.gae().scores == {"values"} and not credit.gae().extras
    assert credit.gae(bootstrap=True).extras == {"last_values"}
    batch = batch_of_turns([[1]], [1.0]).with_score("values", np.zeros((1, 32)))
    with pytest.raises(ValueError, match="credit needs the extra last_values"):
        credit.assign(credit.gae(bootstrap=True), batch)
