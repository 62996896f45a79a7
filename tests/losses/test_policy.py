"""Clipped policy gradients and supervised loss: printed numbers, references, edge cases."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent import losses
from jaxagent.data.batch import action_mask, observation_mask
from jaxagent.data.kinds import Kind
from jaxagent.data.packing import pack
from jaxagent.data.synthetic import random_episodes
from jaxagent.losses.base import ratio

pytestmark = pytest.mark.usefixtures("x64")

A = Kind.ACTION
NAN = float("nan")


def value(loss: losses.Loss, logprobs: Any, batch: Any) -> float:
    numerator, denominator, _ = loss.fn({"logprobs": jnp.asarray(logprobs)}, batch)
    return float(ratio(numerator, denominator))


def gradient(loss: losses.Loss, logprobs: Any, batch: Any) -> np.ndarray:
    def scalar(lp: jax.Array) -> jax.Array:
        return ratio(*loss.fn({"logprobs": lp}, batch)[:2])

    return np.asarray(jax.grad(scalar)(jnp.asarray(logprobs)))


def test_printed_numbers_of_ppo_dr_grpo_and_dapo(f1: Any) -> None:
    logprobs, batch, case = f1
    for aggregate, wanted in (("token", 0.1), ("episode", -0.1), ("episode_sum", 0.25)):
        loss = losses.clipped_policy_gradient(0.2, 0.2, aggregate=aggregate)  # type: ignore[arg-type]
        assert value(loss, logprobs, batch) == pytest.approx(wanted, abs=1e-9)
    half = batch.replace(advantages=case.spread([0.5, -0.5]))
    for mean, wanted in ((True, 0.0416667), (False, 0.0833333)):
        loss = losses.clipped_policy_gradient(
            0.2, 0.2, aggregate="constant", constant=3, episode_mean=mean
        )
        assert value(loss, logprobs, half) == pytest.approx(wanted, abs=1e-7)
    dapo = losses.clipped_policy_gradient(clip_low=0.2, clip_high=0.28)
    assert value(dapo, logprobs, batch) == pytest.approx(0.084, abs=1e-9)


def test_vectors(laid: Callable[..., Any], vectors: dict[str, Any]) -> None:
    episodes, expected = vectors["episodes"], vectors["expected"]
    case = laid([[A] * len(e["lp"]) for e in episodes], vectors["reward"], vectors["group"])
    logprobs = case.lay([e["lp"] for e in episodes])
    advantages = case.spread(_group_relative(vectors))
    for old in ("behavior", "proximal"):
        laid_old = case.lay([e["old"] for e in episodes])
        batch = (
            case.batch.replace(behavior_logprobs=laid_old, advantages=advantages)
            if old == "behavior"
            else case.batch.replace(advantages=advantages).with_score("proximal", laid_old)
        )
        for key, scale, options in (
            ("clip_0.2_0.28_token", 1, {"aggregate": "token"}),
            ("clip_0.2_0.28_episode", 1, {"aggregate": "episode"}),
            (
                "clip_0.2_0.28_constant_Lmax8",
                1,
                {"aggregate": "constant", "constant": 8, "episode_mean": True},
            ),
            ("clip_dual3_token", 4, {"clip_high": 0.2, "dual_clip": 3.0}),
        ):
            loss = losses.clipped_policy_gradient(
                **{"clip_low": 0.2, "clip_high": 0.28, "old": old, **options}  # type: ignore[arg-type]
            )
            scaled = batch.replace(advantages=scale * batch.advantages)
            assert value(loss, logprobs, scaled) == pytest.approx(expected[key], abs=2e-7), key


def test_dual_clip_bounds_a_ratio_that_ran_away(laid: Callable[..., Any]) -> None:
    case = laid([[A]], [0.0], [0])
    batch = case.batch.replace(advantages=case.spread([-2.0]))
    logprobs = case.lay([[np.log(7.0)]])
    assert value(losses.clipped_policy_gradient(), logprobs, batch) == pytest.approx(14.0)
    dual = losses.clipped_policy_gradient(dual_clip=3.0)
    assert value(dual, logprobs, batch) == pytest.approx(6.0)
    assert not gradient(dual, logprobs, batch).any()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("aggregate", ["token", "episode", "episode_sum", "constant"])
def test_random_packed_batches_match_a_loop(seed: int, aggregate: str) -> None:
    batch, logprobs = random_batch(seed)
    options: dict[str, Any] = {"aggregate": aggregate}
    if aggregate == "constant":
        options |= {"constant": 7.0, "episode_mean": True}
    loss = losses.clipped_policy_gradient(0.1, 0.3, dual_clip=2.0, **options)

    sums: dict[int, float] = {}
    counts: dict[int, int] = {}
    for r, t in zip(*np.nonzero(batch.kind == A), strict=True):
        episode = int(batch.episode_ids[r, t])
        if not batch.valid[episode]:
            continue
        rho, adv = np.exp(logprobs[r, t] - batch.behavior_logprobs[r, t]), batch.advantages[r, t]
        item = max(-adv * rho, -adv * np.clip(rho, 0.9, 1.3))
        item = min(item, -2 * adv) if adv < 0 else item
        sums[episode] = sums.get(episode, 0.0) + item
        counts[episode] = counts.get(episode, 0) + 1
    means = [sums[e] / counts[e] for e in sums]
    wanted = {
        "token": sum(sums.values()) / sum(counts.values()),
        "episode": np.mean(means),
        "episode_sum": np.mean(list(sums.values())),
        "constant": np.mean(list(sums.values())) / 7.0,
    }[aggregate]
    assert value(loss, logprobs, batch) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    "loss",
    [
        losses.clipped_policy_gradient(0.2, 0.28),
        losses.clipped_policy_gradient(0.2, 0.28, dual_clip=3.0, aggregate="episode"),
        losses.supervised(aggregate="episode_sum"),
        losses.observation_prediction("episode"),
    ],
)
def test_gradients_match_finite_differences(loss: losses.Loss) -> None:
    batch, logprobs = random_batch(5)
    exact = gradient(loss, logprobs, batch)
    for r, t in [*[*zip(*np.nonzero(exact), strict=True)][:12], (0, 0)]:
        step = np.zeros_like(logprobs)
        step[r, t] = 1e-6
        slope = (value(loss, logprobs + step, batch) - value(loss, logprobs - step, batch)) / 2e-6
        assert exact[r, t] == pytest.approx(slope, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("loss", "mask"),
    [
        (losses.clipped_policy_gradient(), action_mask),
        (losses.supervised(), action_mask),
        (losses.observation_prediction(), observation_mask),
        (losses.observation_prediction("episode"), observation_mask),
    ],
)
def test_masked_positions_may_hold_anything(loss: losses.Loss, mask: Any) -> None:
    batch, logprobs = random_batch(2)
    used = np.asarray(mask(batch))
    for junk in (-np.inf, np.inf, NAN):
        dirty = np.where(used, logprobs, junk)
        assert value(loss, dirty, batch) == value(loss, logprobs, batch)
        np.testing.assert_array_equal(gradient(loss, dirty, batch), gradient(loss, logprobs, batch))
    for name in ("behavior_logprobs", "advantages"):
        dirty_batch = batch.replace(
            **{name: np.where(batch.kind == A, getattr(batch, name), -np.inf)}
        )
        assert value(loss, logprobs, dirty_batch) == value(loss, logprobs, batch)
        assert np.isfinite(gradient(loss, logprobs, dirty_batch)).all()


@pytest.mark.parametrize("shift", [-100.0, 100.0])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_stale_tokens_stay_finite(shift: float, advantage: float) -> None:
    batch, _ = random_batch(2)
    batch = batch.replace(advantages=np.where(batch.kind == A, advantage, 0.0))
    far = batch.behavior_logprobs + shift
    for dtype in (np.float64, np.float32):
        loss = losses.clipped_policy_gradient()
        assert np.isfinite(value(loss, far.astype(dtype), batch))
        assert np.isfinite(gradient(loss, far.astype(dtype), batch)).all()


def test_nothing_to_learn_from_is_zero_not_nan(laid: Callable[..., Any]) -> None:
    case = laid([[Kind.TEMPLATE], [A]], [0.0, 0.0], [0, 0], valid=[True, False])
    logprobs = case.lay([[-1.0], [-1.0]])
    for loss in (
        losses.clipped_policy_gradient(),
        losses.clipped_policy_gradient(aggregate="episode"),
        losses.clipped_policy_gradient(aggregate="episode_sum"),
        losses.clipped_policy_gradient(aggregate="constant", constant=2, episode_mean=True),
        losses.clipped_policy_gradient(aggregate="constant", constant=2, episode_mean=False),
        losses.supervised(),
        losses.observation_prediction(),
        losses.observation_prediction("episode"),
    ):
        assert value(loss, logprobs, case.batch) == 0.0
        assert not gradient(loss, logprobs, case.batch).any()
        objective = losses.combine(term=(1.0, loss))
        _, metrics = objective({"logprobs": jnp.asarray(logprobs)}, case.batch)
        assert all(np.isfinite(float(metric)) for metric in metrics.values())


def test_order_and_padding_do_not_matter() -> None:
    episodes = random_episodes(9, groups=2, max_contexts=2)
    by_token: dict[tuple[int, ...], float] = {}
    results = []
    for order, buckets, rows in ((1, (64,), None), (-1, (64,), None), (1, (200,), 16)):
        batch: Any = pack(episodes[::order], buckets=buckets, rows=rows)
        logprobs = np.zeros(batch.tokens.shape)
        rng = np.random.default_rng(0)
        for r, t in zip(*np.nonzero(batch.segment_ids), strict=True):
            index = int(batch.episode_ids[r, t])
            index = len(episodes) - 1 - index if order < 0 else index
            fields = (batch.turn_ids, batch.positions, batch.kind, batch.tokens)
            key = (index, *(int(field[r, t]) for field in fields))
            logprobs[r, t] = by_token.setdefault(key, -rng.random())
        batch = batch.replace(advantages=batch.behavior_logprobs * 3)
        results.append(
            [
                value(loss, logprobs, batch)
                for loss in (
                    losses.clipped_policy_gradient(aggregate="episode"),
                    losses.clipped_policy_gradient(),
                    losses.observation_prediction("episode"),
                )
            ]
        )
    np.testing.assert_allclose(results[1], results[0], rtol=1e-12)
    np.testing.assert_allclose(results[2], results[0], rtol=1e-12)


def test_on_policy_gradient_is_reinforce() -> None:
    batch, _ = random_batch(4)
    on_policy = np.where(batch.kind == A, batch.behavior_logprobs, 0.0)
    found = gradient(losses.clipped_policy_gradient(), on_policy, batch)
    active = (batch.kind == A) & np.append(batch.valid, False)[batch.episode_ids]
    np.testing.assert_allclose(found, np.where(active, -batch.advantages, 0) / active.sum())


def test_misuse_fails_at_construction() -> None:
    for options, message in (
        ({"aggregate": "mean"}, "aggregate must be one of"),
        ({"aggregate": "constant"}, "needs constant"),
        ({"aggregate": "constant", "constant": 5}, "episode_mean"),
        ({"constant": 5.0}, "only go with"),
        ({"clip_low": -0.1}, "clip_low"),
        ({"clip_high": NAN}, "clip_high"),
        ({"dual_clip": 0.5}, "dual_clip"),
        ({"old": "reference"}, "old must be"),
    ):
        with pytest.raises(ValueError, match=message):
            losses.clipped_policy_gradient(**options)
    with pytest.raises(ValueError, match="normalise"):
        losses.observation_prediction("row")  # type: ignore[arg-type]
    assert losses.clipped_policy_gradient(old="proximal").scores == {"proximal"}


def random_batch(seed: int) -> tuple[Any, np.ndarray]:
    """A packed float64 batch with invalid episodes and several contexts, and log-probs."""
    rng = np.random.default_rng(seed)
    episodes = random_episodes(seed, groups=3, max_contexts=2, invalid=0.2)
    batch: Any = pack(episodes, buckets=(64,), rows_multiple=2)
    dead = rng.integers(0, len(episodes))
    batch = batch.replace(
        behavior_logprobs=batch.behavior_logprobs.astype(np.float64),
        advantages=np.where(batch.kind == A, rng.normal(size=batch.tokens.shape), 0.0),
        valid=batch.valid & (np.arange(batch.num_episodes) != dead),
    )
    return batch, batch.behavior_logprobs + 0.3 * rng.normal(size=batch.tokens.shape)


def _group_relative(vectors: dict[str, Any]) -> np.ndarray:
    rewards, groups = np.asarray(vectors["reward"]), np.asarray(vectors["group"])
    out = np.zeros_like(rewards)
    for group in set(groups.tolist()):
        own = rewards[groups == group]
        out[groups == group] = (own - own.mean()) / (own.std(ddof=1) + 1e-6)
    return out
