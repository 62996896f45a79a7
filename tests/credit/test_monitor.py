"""The monitor of StopLoss: its scores by turn, its threshold, and what a stopped episode is."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent import credit, losses
from jaxagent.credit.turns import turn_span
from jaxagent.data.batch import action_mask
from jaxagent.data.kinds import Kind
from jaxagent.data.packing import pack
from jaxagent.data.synthetic import random_episodes


def test_printed_numbers_of_the_threshold() -> None:
    scores = [0.9, 0.1, 0.3, 0.2]
    assert credit.stop_threshold(scores, 0.25) == 0.3
    assert credit.stop_threshold(scores, 0.25, finite_sample=True) == 0.9
    assert credit.stop_threshold(scores, 0.1, finite_sample=True) == math.inf
    kept = [score for score in scores if not credit.should_stop([score], 0.3)]
    assert len(kept) == 3


@pytest.mark.parametrize("count", [1, 10, 30, 99])
@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.3, 0.5])
def test_the_threshold_is_the_smallest_that_keeps_enough(count: int, alpha: float) -> None:
    scores = np.random.default_rng(count).random(count)
    tau = credit.stop_threshold(scores, alpha)
    needed = (1 - alpha) * count - 1e-6
    assert (scores <= tau).sum() >= needed > (scores < tau).sum() - 1e-9
    assert credit.stop_threshold(scores, alpha, finite_sample=True) >= tau


@given(
    runs=st.lists(st.lists(st.floats(-50, 50), min_size=1, max_size=6), min_size=1, max_size=20),
    alpha=st.floats(0.01, 0.99),
)
def test_the_promised_share_of_successful_runs_is_never_stopped(
    runs: list[list[float]], alpha: float
) -> None:
    tau = credit.stop_threshold([max(run) for run in runs], alpha)
    whole = 0
    for run in runs:
        checks = [credit.should_stop(run[: k + 1], tau) for k in range(len(run))]
        assert checks == sorted(checks), "once over the threshold, always over it"
        whole += not checks[-1]
    assert whole >= (1 - alpha) * len(runs) - 1e-6
    assert not credit.should_stop([], tau) and not credit.should_stop(runs[0], math.inf)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_scores_are_those_of_each_turns_last_action_token(seed: int) -> None:
    episodes = random_episodes(seed, max_contexts=2, invalid=0.2, truncated=0.3)
    batch = pack(episodes, buckets=(64,), rows=8, num_episodes=8, max_turns=8)
    logits = np.random.default_rng(seed).normal(size=batch.tokens.shape).astype(np.float32)
    found = np.asarray(credit.failure_scores(batch, logits))
    first, last = (np.asarray(x) for x in turn_span(batch, action_mask(batch)))
    flat = batch.tokens.size
    for episode in range(8):
        for turn in range(8):
            where = np.flatnonzero(
                (batch.episode_ids == episode)
                & (batch.turn_ids == turn)
                & (batch.kind == Kind.ACTION)
            )
            if where.size:
                assert found[episode, turn] == logits.reshape(-1)[where[-1]]
                assert (first[episode, turn], last[episode, turn]) == (where[0], where[-1])
            else:
                assert found[episode, turn] == -np.inf
                assert (first[episode, turn], last[episode, turn]) == (flat, -1)


def test_stopped_episodes_are_no_failures_to_anybody() -> None:
    episodes = random_episodes(0, groups=2, group_size=3)
    rewarded = [replace(e, reward=float(i % 2)) for i, e in enumerate(episodes)]
    halted = [credit.stopped(rewarded[0]), *rewarded[1:]]
    assert halted[0].truncated == "monitor" and halted[0].reward == 0.0
    shape: Any = {"buckets": (64,), "rows": 8, "num_episodes": 8, "max_turns": 4}
    for batch in (pack(halted, **shape), pack(halted, **shape, truncation="mask")):
        assert not batch.valid[0] and batch.truncated[0]
        assert not (batch.episode_ids == 0).any()
        # Its group's mean is that of the others: 1 and 0.
        assigned, _ = credit.assign(credit.group_relative(scale="none"), batch)
        assert sorted({round(float(x), 5) for x in np.asarray(assigned.advantages).flat}) == [
            pytest.approx(-2 / 3, abs=1e-5), -0.5, 0.0, pytest.approx(1 / 3, abs=1e-5), 0.5
        ]  # fmt: skip
        loss = losses.failure_prediction()
        counted = loss.fn({"failure": jnp.zeros(batch.tokens.shape)}, batch)[1]
        assert int(counted) == sum(e.num_action_tokens for e in rewarded[1:])


def test_nan_stops_nothing_silently() -> None:
    with pytest.raises(ValueError, match="must not be NaN"):
        credit.should_stop([0.1, math.nan], 0.5)
    with pytest.raises(ValueError, match="must not be NaN"):
        credit.should_stop([0.1], math.nan)
    for make, message in (
        (lambda: credit.stop_threshold([], 0.1), "at least one"),
        (lambda: credit.stop_threshold([float("nan")], 0.1), "no NaN"),
        (lambda: credit.stop_threshold([0.5], 1.0), "alpha must lie"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_scores_under_jit() -> None:
    batch = pack(random_episodes(3), buckets=(64,), rows=4)
    logits = np.arange(batch.tokens.size, dtype=np.float32).reshape(batch.tokens.shape)
    eager = credit.failure_scores(batch, logits)
    np.testing.assert_array_equal(jax.jit(credit.failure_scores)(batch, logits), eager)
