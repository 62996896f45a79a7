"""Policy-gradient losses on the tokens the policy sampled."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxagent.data.batch import Batch, action_mask, episode_token_mean, per_token
from jaxagent.losses.base import (
    Aggregate,
    Loss,
    Metrics,
    Outputs,
    clamp_log_ratio,
    select,
    token_loss,
)

_MAX_GSPO_EXPONENT = 10.0

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
    _check_clips(clip_low, clip_high)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1 (or None), got {dual_clip}")
    scores = old_scores(old)

    def fn(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        return clipped_losses(
            outputs, batch, old_logprobs(batch, old), clip_low, clip_high, dual_clip
        )

    return token_loss(fn, aggregate, constant, episode_mean, scores=scores, old=old)


def clipped_losses(
    outputs: Outputs,
    batch: Batch,
    old: jax.Array,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[jax.Array, jax.Array, Metrics]:
    """The clipped surrogate of each ACTION token, with ratios to ``old`` [R,T]."""
    mask, advantages, log_ratio = policy_tokens(outputs, batch, old)
    losses, clipped = _surrogate(advantages, jnp.exp(log_ratio), clip_low, clip_high)
    count = jnp.sum(mask)
    metrics = {
        "clip_fraction": (jnp.sum(mask & clipped), count),
        **ratio_metrics(mask, log_ratio),
    }
    if dual_clip is not None:
        bound = -advantages * dual_clip
        metrics["dual_clip_fraction"] = (
            jnp.sum(mask & (advantages < 0) & (losses > bound)),
            count,
        )
        losses = jnp.where(advantages < 0, jnp.minimum(losses, bound), losses)
    return losses, mask, metrics


def reinforce(
    aggregate: Aggregate = "token",
    constant: float | None = None,
    episode_mean: bool | None = None,
) -> Loss:
    """``-A log p``: no ratio, so it is unbiased only for tokens the policy itself drew.

    For others, wrap it in :func:`jaxagent.losses.corrections.corrected`. Source: Williams 1992.
    """

    def fn(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        mask = action_mask(batch)
        advantages = select(mask, jax.lax.stop_gradient(jnp.asarray(batch.advantages)))
        return -advantages * select(mask, outputs["logprobs"]), mask, {}

    return token_loss(fn, aggregate, constant, episode_mean)


def cispo(
    clip_low: float = 1.0,
    clip_high: float = 0.2,
    aggregate: Aggregate = "token",
    constant: float | None = None,
    episode_mean: bool | None = None,
    old: OldPolicy = "behavior",
) -> Loss:
    """``-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log p``: the *weight* is clipped.

    Unlike under :func:`clipped_policy_gradient` no token ever loses its gradient.
    ``clip_low`` of 1 or more is no lower bound, the default. ``r`` and ``old`` as there.

    Source: MiniMax 2025 (MiniMax-M1); verl's ``compute_policy_loss_cispo``.
    """
    _check_clips(clip_low, clip_high)
    scores = old_scores(old)

    def fn(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        mask, advantages, log_ratio = policy_tokens(outputs, batch, old_logprobs(batch, old))
        ratio = jnp.exp(jax.lax.stop_gradient(log_ratio))
        weight = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
        losses = -weight * advantages * select(mask, outputs["logprobs"])
        metrics = {
            "clip_fraction": (jnp.sum(mask & (weight != ratio)), jnp.sum(mask)),
            **ratio_metrics(mask, log_ratio),
        }
        return losses, mask, metrics

    return token_loss(fn, aggregate, constant, episode_mean, scores=scores, old=old)


def gspo(
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    aggregate: Aggregate = "episode",
    constant: float | None = None,
    episode_mean: bool | None = None,
    old: OldPolicy = "behavior",
) -> Loss:
    """``max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high))`` with the episode's ratio s.

    ``s = exp(mean_t (log p - log p_old))`` over the episode's ACTION tokens, all contexts
    together. Each token's ``s_t = exp(log p_t - sg(log p_t) + sg(log s))``, its exponent at
    most 10, has the value of s and a gradient of its own, so advantages may differ from
    token to token; where they do not, value and gradient are those of the formula above.

    Source: Zheng et al. 2025 (GSPO, GSPO-token); verl's ``compute_policy_loss_gspo``.
    """
    _check_clips(clip_low, clip_high)
    scores = old_scores(old)

    def fn(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        mask, advantages, log_ratio = policy_tokens(
            outputs, batch, old_logprobs(batch, old), clamp=False
        )
        mean = per_token(batch, episode_token_mean(batch, log_ratio, mask))
        mean = jax.lax.stop_gradient(mean)
        exponent = select(mask, log_ratio - jax.lax.stop_gradient(log_ratio) + mean)
        ratio = jnp.exp(jnp.minimum(exponent, _MAX_GSPO_EXPONENT))
        losses, clipped = _surrogate(advantages, ratio, clip_low, clip_high)
        metrics = {
            "clip_fraction": (jnp.sum(mask & clipped), jnp.sum(mask)),
            **ratio_metrics(mask, clamp_log_ratio(exponent)),
        }
        return losses, mask, metrics

    return token_loss(
        fn, aggregate, constant, episode_mean, scores=scores, old=old, token_local=False
    )


def dppo(
    drop_low: float = 0.2,
    drop_high: float = 0.2,
    drift_weight: float = 1e-3,
    aggregate: Aggregate = "token",
    constant: float | None = None,
    episode_mean: bool | None = None,
) -> Loss:
    """``-keep A r + drift_weight (log r)^2``, r the ratio to the sampler: prime-rl's default.

    The trust region is one of probabilities: with d = p - p_sampler, the first term is
    dropped (not clipped) where A > 0 and d > ``drop_high``, or A <= 0 and d < -``drop_low``.
    Dropped tokens keep the second term and count in the denominator.

    Source: prime-rl's ``trainer/rl/loss.py`` (the code; its documentation states another
    formula).
    """
    for name, value in (("drop_low", drop_low), ("drop_high", drop_high)):
        if not value > 0:
            raise ValueError(f"{name} must be above 0, got {value}")
    if not drift_weight >= 0:
        raise ValueError(f"drift_weight must be at least 0, got {drift_weight}")

    def fn(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        old = old_logprobs(batch, "behavior")
        mask, advantages, log_ratio = policy_tokens(outputs, batch, old, clamp=False)
        change = probability_change(mask, outputs["logprobs"], old)
        keep = mask & jnp.where(advantages > 0, change <= drop_high, change >= -drop_low)
        policy = -advantages * jnp.exp(clamp_log_ratio(log_ratio))
        metrics = {
            "trusted_fraction": (jnp.sum(keep), jnp.sum(mask)),
            **ratio_metrics(mask, clamp_log_ratio(log_ratio)),
        }
        return select(keep, policy) + drift_weight * log_ratio**2, mask, metrics

    return token_loss(fn, aggregate, constant, episode_mean, old="behavior")


def supervised(
    aggregate: Aggregate = "token",
    constant: float | None = None,
    episode_mean: bool | None = None,
) -> Loss:
    """Negative log-likelihood of ACTION tokens: behaviour cloning of the batch's episodes.

    Uses neither advantages nor rewards; the tokens may come from demonstrations.
    """

    def fn(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        mask = action_mask(batch)
        return -select(mask, outputs["logprobs"]), mask, {}

    return token_loss(fn, aggregate, constant, episode_mean)


def policy_tokens(
    outputs: Outputs, batch: Batch, old: jax.Array, clamp: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """ACTION mask, advantages and log-ratios to ``old`` [R,T]; 0 off the mask."""
    mask = action_mask(batch)
    advantages = select(mask, jax.lax.stop_gradient(jnp.asarray(batch.advantages)))
    log_ratio = select(mask, outputs["logprobs"]) - select(mask, old)
    return mask, advantages, clamp_log_ratio(log_ratio) if clamp else log_ratio


def ratio_metrics(mask: jax.Array, log_ratio: jax.Array) -> dict[str, Any]:
    """Size of the ratios over ``mask``; ``log_ratio`` [R,T] is clamped already."""
    ratio, count = jnp.exp(log_ratio), jnp.sum(mask)
    return {
        "ratio_mean": (jnp.sum(select(mask, ratio)), count),
        "ratio_max": jnp.max(select(mask, ratio), initial=0.0),
        # k3 estimate of KL(old || current), from tokens of the old policy.
        "kl_old": (jnp.sum(select(mask, ratio - 1 - log_ratio)), count),
    }


def probability_change(mask: jax.Array, logprobs: jax.Array, old: jax.Array) -> jax.Array:
    """sg(p - p_old) of the sampled tokens, 0 off the mask."""
    change = jnp.exp(select(mask, logprobs)) - jnp.exp(select(mask, old))
    return jax.lax.stop_gradient(change)


def _surrogate(
    advantages: jax.Array, ratio: jax.Array, clip_low: float, clip_high: float
) -> tuple[jax.Array, jax.Array]:
    """``max(-A r, -A clip(r, ...))`` and where the clipped side is the larger."""
    unclipped = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    return jnp.maximum(unclipped, clipped), clipped > unclipped


def _check_clips(clip_low: float, clip_high: float) -> None:
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high)):
        if not value >= 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
