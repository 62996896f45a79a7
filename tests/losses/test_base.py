"""combine: sums, denominators, needs, weights, and a loss of one's own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent import losses
from jaxagent.data.batch import Batch, action_mask
from jaxagent.data.packing import pack
from jaxagent.data.synthetic import random_episodes


@pytest.fixture(scope="module")
def case() -> tuple[dict[str, jax.Array], Batch]:
    rng = np.random.default_rng(0)
    batch = pack(random_episodes(0), buckets=(64,))
    shape = batch.tokens.shape
    batch = batch.with_score("reference", -rng.random(shape).astype(np.float32)).replace(  # type: ignore[attr-defined]
        advantages=rng.normal(size=shape).astype(np.float32)
    )
    return {"logprobs": jnp.asarray(-3 * rng.random(shape), jnp.float32)}, batch


def test_a_loss_of_ones_own_takes_ten_lines(case: Any) -> None:
    outputs, batch = case

    def reinforce(outputs: Any, batch: Batch) -> Any:
        mask = action_mask(batch)
        logprobs = losses.select(mask, outputs["logprobs"])
        loss = -jnp.sum(logprobs * batch.advantages)
        return loss, jnp.sum(mask), {"logprob": (jnp.sum(logprobs), jnp.sum(mask))}

    objective = losses.combine(policy=(1.0, reinforce))
    loss, metrics = jax.jit(objective)(outputs, batch)
    mask = np.asarray(action_mask(batch))
    wanted = -(np.asarray(outputs["logprobs"]) * batch.advantages)[mask].mean()
    assert float(loss) == pytest.approx(wanted, rel=1e-5)
    assert float(metrics["policy/logprob"]) == pytest.approx(
        np.asarray(outputs["logprobs"])[mask].mean(), rel=1e-5
    )
    assert objective.needs == {"logprobs"} and not objective.token_local


def test_combining_is_the_weighted_sum_of_gradients(case: Any) -> None:
    outputs, batch = case
    terms: dict[str, Any] = {
        "policy": (1.0, losses.clipped_policy_gradient()),
        "world": (0.05, losses.observation_prediction()),
        "kl": (0.3, losses.kl_to_reference("k3")),
    }

    def gradient(objective: losses.Objective) -> Any:
        return jax.grad(lambda lp: objective({"logprobs": lp}, batch)[0])(outputs["logprobs"])

    together = gradient(losses.combine(**terms))
    apart = sum(w * gradient(losses.combine(one=(1.0, loss))) for w, loss in terms.values())
    np.testing.assert_allclose(together, apart, rtol=1e-6, atol=1e-9)


def test_a_weight_of_zero_only_logs(case: Any) -> None:
    outputs, batch = case
    policy = losses.clipped_policy_gradient()
    plain = losses.combine(policy=(1.0, policy))
    logged = losses.combine(policy=(1.0, policy), world=(0.0, losses.observation_prediction()))

    def both(objective: losses.Objective) -> Any:
        return jax.value_and_grad(lambda lp: objective({"logprobs": lp}, batch), has_aux=True)(
            outputs["logprobs"]
        )

    (loss, _), gradient = both(plain)
    (loss0, metrics), gradient0 = both(logged)
    assert float(loss) == float(loss0)
    np.testing.assert_array_equal(gradient, gradient0)
    assert float(metrics["world/loss"]) > 0


def test_a_weight_may_be_a_schedule(case: Any) -> None:
    outputs, batch = case
    objective = losses.combine(world=(lambda step: 0.5 * step, losses.observation_prediction()))
    one, two = (float(objective(outputs, batch, step)[0]) for step in (1, 2))
    assert two == pytest.approx(2 * one) and one > 0


def test_needs_are_the_union_and_missing_ones_are_named(case: Any) -> None:
    objective = losses.combine(
        policy=(1.0, losses.clipped_policy_gradient(old="proximal")),
        kl=(0.1, losses.kl_to_reference()),
        bonus=(0.01, losses.entropy_bonus()),
    )
    assert objective.needs == {"logprobs", "entropy"}
    assert objective.scores == {"proximal", "reference"}
    assert objective.token_local
    given = frozenset({"logprobs", "entropy"})
    objective.require(outputs=given, scores=frozenset({"proximal", "reference"}))
    with pytest.raises(ValueError, match="term 'kl' needs the score reference"):
        objective.require(outputs=given, scores=frozenset({"proximal"}))
    with pytest.raises(ValueError, match="term 'bonus' needs the output entropy"):
        objective.require(outputs=frozenset({"logprobs"}))


def test_misuse_fails_at_construction() -> None:
    loss = losses.supervised()
    with pytest.raises(ValueError, match="at least one term"):
        losses.combine()
    with pytest.raises(TypeError, match="'policy' must be a pair"):
        losses.combine(policy=loss)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="weight of term 'policy'"):
        losses.combine(policy=("1", loss))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="weight of term 'policy'"):
        losses.combine(policy=(float("nan"), loss))
    with pytest.raises(TypeError, match="Loss or a function"):
        losses.combine(policy=(1.0, "ppo"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda lp: (lp.sum(), lp.size), r"'mine' returned 2 values: a loss returns \(numerator"),
        (lambda lp: lp.sum(), "'mine' returned ArrayImpl: a loss returns"),
        (lambda lp: (lp, lp.size, {}), r"numerator of shape \(2, 3\).*sum it up"),
        (lambda lp: (lp.sum(), lp > 0, {}), r"denominator of shape \(2, 3\)"),
        (lambda lp: (lp.sum(), lp.size, None), "metrics of type NoneType"),
        (lambda lp: (lp.sum(), lp.size, {"far": lp}), r"metric 'far' of shape \(2, 3\)"),
    ],
)
def test_what_a_loss_returns_is_checked(returned: Any, message: str) -> None:
    objective = losses.combine(mine=(1.0, lambda outputs, batch: returned(outputs["logprobs"])))
    with pytest.raises((TypeError, ValueError), match=message):
        objective({"logprobs": jnp.zeros((2, 3))}, None)  # type: ignore[arg-type]
