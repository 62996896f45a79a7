"""Policy-gradient losses on the tokens the policy sampled."""

from typing import Literal

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

# Whose log-probabilities the ratio is taken against.
OldPolicy = Literal["behavior", "proximal"]


def old_logprobs(batch: Batch, old: OldPolicy) -> jax.Array:
    """[R,T]: the sampler's own log-probabilities, or those of ``scores["proximal"]``."""
    values = batch.behavior_logprobs if old == "behavior" else batch.scores["proximal"]
    return jax.lax.stop_gradient(jnp.asarray(values))


def old_scores(old: str) -> frozenset[str]:
    """The scores that :func:`old_logprobs` reads; ValueError for an unknown name."""
    if old not in ("behavior", "proximal"):
        raise ValueError(f"old must be 'behavior' or 'proximal', got {old!r}")
    return frozenset({"proximal"}) if old == "proximal" else frozenset()


def clipped_policy_gradient(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    aggregate: Aggregate = "token",
    constant: float | None = None,
    episode_mean: bool | None = None,
    old: OldPolicy = "behavior",
) -> Loss:
    """PPO's clipped surrogate: ``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))``.

    ``r`` is the probability ratio to ``old``: the sampler (``behavior_logprobs``) or the
    policy at the start of the update (``scores["proximal"]``). ``clip_high`` above
    ``clip_low`` is DAPO's clip-higher; ``dual_clip`` c > 1 bounds the loss by ``-A c``
    where A < 0. ``aggregate``: see :func:`jaxagent.losses.base.aggregate_tokens`.

    Source: Schulman et al. 2017; verl's ``compute_policy_loss_vanilla``; Yu et al. 2025
    (DAPO); Ye et al. 2020 (dual clip); Liu et al. 2025 (Dr. GRPO, the constant).
    """
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high)):
        if not value >= 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1 (or None), got {dual_clip}")
    check_aggregate(aggregate, constant, episode_mean)
    scores = old_scores(old)

    def fn(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        mask = action_mask(batch)
        difference = select(mask, outputs["logprobs"]) - select(mask, old_logprobs(batch, old))
        log_ratio = clamp_log_ratio(difference)
        ratio = jnp.exp(log_ratio)
        advantages = select(mask, jax.lax.stop_gradient(jnp.asarray(batch.advantages)))
        unclipped = -advantages * ratio
        clipped = -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
        losses = jnp.maximum(unclipped, clipped)
        count = jnp.sum(mask)
        metrics = {
            "clip_fraction": (jnp.sum(mask & (clipped > unclipped)), count),
            "ratio_mean": (jnp.sum(select(mask, ratio)), count),
            "ratio_max": jnp.max(select(mask, ratio), initial=0.0),
            # k3 estimate of KL(old || current), from tokens of the old policy.
            "kl_old": (jnp.sum(select(mask, ratio - 1 - log_ratio)), count),
        }
        if dual_clip is not None:
            bound = -advantages * dual_clip
            metrics["dual_clip_fraction"] = (
                jnp.sum(mask & (advantages < 0) & (losses > bound)),
                count,
            )
            losses = jnp.where(advantages < 0, jnp.minimum(losses, bound), losses)
        numerator, denominator = aggregate_tokens(
            losses, mask, batch, aggregate, constant, episode_mean
        )
        return numerator, denominator, metrics

    return Loss(frozenset({"logprobs"}), scores, fn, token_local=True)


def supervised(
    aggregate: Aggregate = "token",
    constant: float | None = None,
    episode_mean: bool | None = None,
) -> Loss:
    """Negative log-likelihood of ACTION tokens: behaviour cloning of the batch's episodes.

    Uses neither advantages nor rewards; the tokens may come from demonstrations.
    """
    check_aggregate(aggregate, constant, episode_mean)

    def fn(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        mask = action_mask(batch)
        losses = -select(mask, outputs["logprobs"])
        numerator, denominator = aggregate_tokens(
            losses, mask, batch, aggregate, constant, episode_mean
        )
        return numerator, denominator, {}

    return Loss(frozenset({"logprobs"}), frozenset(), fn, token_local=True)
