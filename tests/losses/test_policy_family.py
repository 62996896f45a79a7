"""REINFORCE, CISPO, GSPO, DPPO: printed numbers, and where they agree with one another."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent import losses
from jaxagent.data.batch import action_mask, episode_sum
from jaxagent.data.kinds import Kind
from tests.losses.cases import POLICY
from tests.losses.helpers import Case, gradients, value

pytestmark = pytest.mark.usefixtures("x64")

A = Kind.ACTION
NAN = float("nan")


def slopes(loss: losses.Loss, outputs: Any, batch: Any) -> np.ndarray[Any, Any]:
    return gradients(loss, outputs, batch)["logprobs"]


def test_printed_numbers(f1: Any) -> None:
    logprobs, batch, case = f1
    outputs = {"logprobs": logprobs}
    assert value(losses.gspo(), outputs, batch) == pytest.approx(-0.00035, abs=1e-9)
    assert not slopes(losses.gspo(), outputs, batch).any()  # both ratios are clipped

    both = losses.cispo(0.2, 0.2)
    assert value(both, outputs, batch) == pytest.approx(-0.1181738, abs=1e-7)
    wanted = case.lay([[-0.24, -0.2], [0.16, 0.2, 0.18]])
    np.testing.assert_allclose(slopes(both, outputs, batch), wanted, atol=1e-12)
    for clip_low in (1.0, 10.0):
        assert value(losses.cispo(clip_low, 0.2), outputs, batch) == pytest.approx(
            -0.0349962, abs=1e-7
        )


def test_printed_numbers_of_dppo(laid: Callable[..., Any]) -> None:
    case = laid([[A]], [1.0], [0])
    for p, advantage, wanted, dropped in (
        (0.45, 1.0, -1.4998356, False),
        (0.6, 1.0, 1e-3 * np.log(2) ** 2, True),
        (0.05, -1.0, 1e-3 * np.log(6) ** 2, True),
        (0.6, -1.0, 2 + 1e-3 * np.log(2) ** 2, False),
    ):
        batch = case.batch.replace(
            behavior_logprobs=case.lay([[np.log(0.3)]]), advantages=case.spread([advantage])
        )
        outputs = {"logprobs": case.lay([[np.log(p)]])}
        assert value(losses.dppo(), outputs, batch) == pytest.approx(wanted, abs=1e-7)
        slope = slopes(losses.dppo(drift_weight=0.0), outputs, batch)
        assert slope.any() == (not dropped)
    _, _, metrics = losses.dppo().fn(outputs, batch)
    assert float(metrics["trusted_fraction"][0]) == 1


def test_vectors(laid: Callable[..., Any], vectors: dict[str, Any]) -> None:
    episodes, expected = vectors["episodes"], vectors["expected"]
    case = laid([[A] * len(e["lp"]) for e in episodes], vectors["reward"], vectors["group"])
    outputs = {"logprobs": case.lay([e["lp"] for e in episodes], -np.inf)}
    old = case.lay([e["old"] for e in episodes], -np.inf)
    advantages = case.spread(expected["group_relative_std_ddof1"])
    for name in ("behavior", "proximal"):
        batch = case.batch.replace(advantages=advantages)
        if name == "behavior":
            batch = batch.replace(behavior_logprobs=old)
        else:
            batch = batch.with_score("proximal", old)
        for key, loss in (
            ("gspo_3e-4_4e-4_episode", losses.gspo(3e-4, 4e-4, old=name)),  # type: ignore[arg-type]
            ("cispo_1_0.2_token", losses.cispo(1.0, 0.2, old=name)),  # type: ignore[arg-type]
            ("reinforce_token", losses.reinforce()),
        ):
            assert value(loss, outputs, batch) == pytest.approx(expected[key], abs=1e-6), key


@pytest.mark.parametrize("seed", range(2))
def test_on_policy_they_are_all_reinforce(seed: int) -> None:
    case = Case(seed)
    batch = case.batch.with_score("proximal", case.batch.behavior_logprobs)
    outputs = {"logprobs": batch.behavior_logprobs, "step": 4}
    for aggregate in ("token", "episode", "episode_sum"):
        wanted = slopes(losses.reinforce(aggregate), outputs, batch)  # type: ignore[arg-type]
        assert wanted.any()
        same: dict[str, Any] = {"aggregate": aggregate}
        for loss in (
            losses.clipped_policy_gradient(**same),
            losses.cispo(**same),
            losses.dppo(**same),
            losses.decoupled_policy_gradient(**same),
            losses.decoupled_policy_gradient(proximal="loglinear", **same),
            losses.corrected(losses.reinforce(**same), losses.truncated_importance()),
        ):
            np.testing.assert_allclose(slopes(loss, outputs, batch), wanted, atol=1e-12)
    # GSPO shares the episode's ratio, so only with one advantage an episode, by episode.
    flat = np.append(np.arange(batch.num_episodes) - 3.0, 0.0)[batch.episode_ids]
    batch = batch.replace(advantages=flat)
    wanted = slopes(losses.reinforce("episode"), outputs, batch)
    np.testing.assert_allclose(slopes(losses.gspo(), outputs, batch), wanted, atol=1e-12)
    wanted = slopes(losses.reinforce("token"), outputs, batch)
    np.testing.assert_allclose(slopes(losses.gspo(aggregate="token"), outputs, batch), wanted)


def test_gspo_on_episodes_of_one_token_is_the_token_surrogate(laid: Callable[..., Any]) -> None:
    rng = np.random.default_rng(0)
    case = laid([[A]] * 6, [0.0] * 6, [0] * 6)
    batch = case.batch.replace(
        behavior_logprobs=case.lay(-rng.random((6, 1))), advantages=case.spread(rng.normal(size=6))
    )
    outputs = {"logprobs": batch.behavior_logprobs + case.lay(0.3 * rng.normal(size=(6, 1)))}
    one, other = losses.gspo(0.1, 0.2), losses.clipped_policy_gradient(0.1, 0.2)
    assert value(one, outputs, batch) == pytest.approx(value(other, outputs, batch), rel=1e-12)
    found, wanted = slopes(one, outputs, batch), slopes(other, outputs, batch)
    assert 0 < (wanted != 0).sum() < 6
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_gspo_is_the_sequence_formula_where_advantages_are_constant() -> None:
    case = Case(4)
    flat = np.append(np.arange(case.batch.num_episodes) % 5 - 2.0, 0.0)
    batch = case.batch.replace(advantages=flat[case.batch.episode_ids])
    mask = action_mask(batch)

    def sequence(logprobs: Any) -> Any:
        difference = jnp.where(mask, logprobs - batch.behavior_logprobs, 0.0)
        counts = episode_sum(batch, mask.astype(float))
        s, a = jnp.exp(episode_sum(batch, difference) / jnp.maximum(counts, 1)), flat[:-1]
        items = jnp.maximum(-a * s, -a * jnp.clip(s, 0.95, 1.05))
        return jnp.sum(jnp.where(counts > 0, items, 0.0)) / jnp.sum(counts > 0)

    loss = losses.gspo(0.05, 0.05)
    found = slopes(loss, case.outputs, batch)
    assert value(loss, case.outputs, batch) == pytest.approx(
        float(sequence(case.outputs["logprobs"])), rel=1e-12
    )
    wanted = jax.grad(sequence)(jnp.asarray(case.outputs["logprobs"]))
    np.testing.assert_allclose(found, wanted, atol=1e-12)


@pytest.mark.parametrize("name", sorted(set(POLICY) - {"dppo"}))
def test_without_advantages_there_is_no_gradient_at_all(name: str) -> None:
    case = Case(0)
    batch = case.batch.replace(advantages=0 * case.batch.advantages)
    assert not slopes(POLICY[name].loss, case.outputs, batch).any()


def test_misuse_fails_at_construction() -> None:
    for make, options, message in (
        (losses.cispo, {"clip_low": -0.1}, "clip_low"),
        (losses.cispo, {"old": "reference"}, "old must be"),
        (losses.gspo, {"clip_high": NAN}, "clip_high"),
        (losses.gspo, {"aggregate": "constant"}, "needs constant"),
        (losses.dppo, {"drop_low": 0.0}, "drop_low"),
        (losses.dppo, {"drop_high": NAN}, "drop_high"),
        (losses.dppo, {"drift_weight": -1.0}, "drift_weight"),
        (losses.reinforce, {"aggregate": "mean"}, "aggregate must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**options)  # type: ignore[operator]
    assert losses.gspo(old="proximal").scores == {"proximal"} == losses.cispo(old="proximal").scores
