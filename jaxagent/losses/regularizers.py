"""Terms that keep the policy near a reference, or random."""

import jax
import jax.numpy as jnp

from jaxagent.data.batch import Batch, action_mask
from jaxagent.losses.base import (
    Aggregate,
    Loss,
    Metrics,
    Outputs,
    aggregate_tokens,
    check_aggregate,
    clamp_log_ratio,
    select,
)

KL_ESTIMATORS = ("k1", "k2", "k3", "k3+")
_MAX_K3 = 10.0


def kl_estimate(estimator: str, logprobs: jax.Array, reference: jax.Array) -> jax.Array:
    """Estimates KL(policy || reference) per token from tokens of the policy.

    With x = logprobs - reference: k1 = x, k2 = x^2 / 2, k3 = exp(-x) + x - 1 (x clamped to
    +-20 and the result to 10, as verl does), and "k3+" has k3's value with k2's gradient.
    Source: Schulman 2020, "Approximating KL divergence"; verl's ``kl_penalty``.
    """
    x = logprobs - reference
    if estimator == "k1":
        return x
    if estimator == "k2":
        return 0.5 * x * x
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"estimator must be one of {', '.join(KL_ESTIMATORS)}; got {estimator!r}")
    clamped = clamp_log_ratio(x)
    k3 = jnp.clip(jnp.exp(-clamped) + clamped - 1, -_MAX_K3, _MAX_K3)
    if estimator == "k3":
        return k3
    k2 = 0.5 * x * x
    return jax.lax.stop_gradient(k3 - k2) + k2


def kl_to_reference(
    estimator: str = "k3",
    aggregate: Aggregate = "token",
    constant: float | None = None,
    episode_mean: bool | None = None,
) -> Loss:
    """KL to ``scores["reference"]`` on ACTION tokens, with its own denominator.

    ``estimator``: "k2", "k3" or "k3+" (see :func:`kl_estimate`). Never together with
    :func:`jaxagent.credit.rewards.kl_in_reward`.
    """
    if estimator == "k1":
        raise ValueError(
            "k1 cannot be a loss: its gradient is the score function alone, whose expectation "
            "is 0 whatever the reference; use 'k2', 'k3' or 'k3+', or k1 in the reward "
            "(kl_in_reward)"
        )
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"estimator must be 'k2', 'k3' or 'k3+'; got {estimator!r}")
    check_aggregate(aggregate, constant, episode_mean)

    def fn(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        mask = action_mask(batch)
        logprobs = select(mask, outputs["logprobs"])
        reference = select(mask, jax.lax.stop_gradient(jnp.asarray(batch.scores["reference"])))
        losses = kl_estimate(estimator, logprobs, reference)
        numerator, denominator = aggregate_tokens(
            losses, mask, batch, aggregate, constant, episode_mean
        )
        metrics = {"k1": (jnp.sum(logprobs - reference), jnp.sum(mask))}
        return numerator, denominator, metrics

    return Loss(frozenset({"logprobs"}), frozenset({"reference"}), fn, token_local=True)


def entropy_bonus(
    aggregate: Aggregate = "token",
    constant: float | None = None,
    episode_mean: bool | None = None,
) -> Loss:
    """Minus the full-vocabulary entropy at ACTION tokens: a positive weight raises entropy.

    A weight of 0 only logs it (as ``<term>/loss``, negated).
    """
    check_aggregate(aggregate, constant, episode_mean)

    def fn(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        mask = action_mask(batch)
        losses = -select(mask, outputs["entropy"])
        numerator, denominator = aggregate_tokens(
            losses, mask, batch, aggregate, constant, episode_mean
        )
        return numerator, denominator, {}

    return Loss(frozenset({"entropy"}), frozenset(), fn, token_local=True)
