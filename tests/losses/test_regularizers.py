"""KL estimators, entropy, observation prediction."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent import losses
from jaxagent.data.kinds import Kind
from jaxagent.losses.base import ratio

pytestmark = pytest.mark.usefixtures("x64")

A, OBS, T = Kind.ACTION, Kind.OBSERVATION, Kind.TEMPLATE


def value(loss: losses.Loss, outputs: dict[str, Any], batch: Any) -> float:
    numerator, denominator, _ = loss.fn({k: jnp.asarray(v) for k, v in outputs.items()}, batch)
    return float(ratio(numerator, denominator))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimators_match_the_vectors(estimator: str, vectors: dict[str, Any]) -> None:
    for episode, wanted in zip(
        vectors["episodes"], vectors["expected"][f"kl_{estimator}"], strict=True
    ):
        found = losses.kl_estimate(
            estimator, jnp.asarray(episode["lp"]), jnp.asarray(episode["ref"])
        )
        np.testing.assert_allclose(found, wanted, atol=1.1e-6)


def test_printed_numbers_and_the_straight_through_gradient() -> None:
    logp, ref = jnp.log(jnp.asarray(0.5)), jnp.log(jnp.asarray(0.25))
    for estimator, wanted, slope in (
        ("k1", 0.6931472, 1.0),
        ("k2", 0.2402265, 0.6931472),
        ("k3", 0.1931472, 0.5),
        ("k3+", 0.1931472, 0.6931472),
    ):
        found, gradient = jax.value_and_grad(lambda x, e=estimator: losses.kl_estimate(e, x, ref))(
            logp
        )
        assert float(found) == pytest.approx(wanted, abs=1e-7)
        assert float(gradient) == pytest.approx(slope, abs=1e-7)


def test_kl_to_reference_means_over_action_tokens(
    laid: Callable[..., Any], vectors: dict[str, Any]
) -> None:
    episodes, expected = vectors["episodes"], vectors["expected"]
    case = laid([[A] * len(e["lp"]) for e in episodes], vectors["reward"], vectors["group"])
    batch = case.batch.with_score("reference", case.lay([e["ref"] for e in episodes], -np.inf))
    logprobs = case.lay([e["lp"] for e in episodes], -np.inf)
    for estimator in ("k2", "k3", "k3+"):
        per_token = expected[f"kl_{estimator[:2]}"]
        loss = losses.kl_to_reference(estimator)
        assert value(loss, {"logprobs": logprobs}, batch) == pytest.approx(
            np.mean(np.concatenate(per_token)), abs=1e-6
        )
        by_episode = losses.kl_to_reference(estimator, aggregate="episode")
        assert value(by_episode, {"logprobs": logprobs}, batch) == pytest.approx(
            np.mean([np.mean(x) for x in per_token]), abs=1e-6
        )


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3+"])
@pytest.mark.parametrize("shift", [-100.0, 100.0])
def test_far_references_stay_finite(laid: Callable[..., Any], estimator: str, shift: float) -> None:
    case = laid([[A, A]], [0.0], [0])
    batch = case.batch.with_score("reference", case.lay([[-1.0 - shift, -1.0]]))
    loss = losses.kl_to_reference(estimator)

    def scalar(lp: jax.Array) -> jax.Array:
        return ratio(*loss.fn({"logprobs": lp}, batch)[:2])

    found, gradient = jax.value_and_grad(scalar)(jnp.asarray(case.lay([[-1.0, -1.0]])))
    assert np.isfinite(float(found)) and np.isfinite(gradient).all()


def test_k1_is_refused_as_a_loss_with_the_reason() -> None:
    with pytest.raises(ValueError, match="expectation is 0"):
        losses.kl_to_reference("k1")
    with pytest.raises(ValueError, match="'k2', 'k3' or 'k3\\+'"):
        losses.kl_to_reference("k4")
    with pytest.raises(ValueError, match="estimator must be one of"):
        losses.kl_estimate("k4", jnp.zeros(1), jnp.zeros(1))


def test_entropy_bonus_pays_for_entropy_on_actions(laid: Callable[..., Any]) -> None:
    case = laid([[A, OBS, A]], [0.0], [0])
    entropy = case.lay([[1.0, np.inf, 2.0]], fill=np.nan)
    assert value(losses.entropy_bonus(), {"entropy": entropy}, case.batch) == pytest.approx(-1.5)
    assert losses.entropy_bonus().needs == {"entropy"}


def test_observation_prediction_prints_its_numbers(laid: Callable[..., Any]) -> None:
    # Template tokens, actions and the prompt hold values that would show.
    case = laid([[A, T, OBS, OBS], [A, OBS]], [0.0, 1.0], [0, 0])
    logprobs = case.lay(
        [[-7.0, -np.inf, np.log(0.5), np.log(0.25)], [-9.0, np.log(0.1)]], fill=-np.inf
    )
    for normalise, wanted, weighted in (
        ("token", 1.4606755, 0.1460676),
        ("episode", 1.6711529, 0.1671153),
    ):
        loss = losses.observation_prediction(normalise)  # type: ignore[arg-type]
        assert value(loss, {"logprobs": logprobs}, case.batch) == pytest.approx(wanted, abs=1e-7)
        total, metrics = losses.combine(world=(0.1, loss))(
            {"logprobs": jnp.asarray(logprobs)}, case.batch
        )
        assert float(total) == pytest.approx(weighted, abs=1e-7)
        assert float(metrics["world/tokens"]) == 3


def test_policy_and_observation_gradients_do_not_mix(laid: Callable[..., Any]) -> None:
    case = laid([[A, OBS, A, OBS], [A, OBS]], [0.0, 1.0], [0, 0])
    batch = case.batch.replace(advantages=case.spread([1.0, -2.0]))
    logprobs = jnp.asarray(case.lay([[-1.0, -2.0, -0.1, -1.0], [-0.3, -3.0]]))
    actions, seen = batch.kind == A, batch.kind == OBS

    def gradient(loss: losses.Loss) -> np.ndarray:
        return np.asarray(
            jax.grad(lambda lp: ratio(*loss.fn({"logprobs": lp}, batch)[:2]))(logprobs)
        )

    policy = gradient(losses.clipped_policy_gradient(2.0, 2.0))
    world = gradient(losses.observation_prediction())
    assert policy[actions].all() and not policy[~actions].any()
    assert world[seen].all() and not world[~seen].any()
