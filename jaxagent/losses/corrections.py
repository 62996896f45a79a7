"""Corrections of policy losses for tokens that another policy drew.

Kernels, number formats and stale weights make the sampler's probabilities differ from the
trainer's. A correction compares the two, token by token, and yields a weight and whether to
keep the token at all; :func:`corrected` applies any number of them to any policy loss.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxagent.data.batch import (
    Batch,
    action_mask,
    episode_max,
    episode_sum,
    episode_token_mean,
    per_token,
)
from jaxagent.losses.base import (
    Aggregate,
    Loss,
    Metrics,
    Outputs,
    TokenLoss,
    clamp_log_ratio,
    ratio,
    select,
    token_loss,
)
from jaxagent.losses.policy import clipped_losses, clipped_policy_gradient

RejectionLevel = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]


class Correction(NamedTuple):
    """``fn(log_ratio, mask, batch) -> (weight [R,T], keep [R,T] bool)``.

    ``log_ratio`` [R,T] is log(trainer / sampler), 0 off ``mask``, without gradient.
    ``weighs``: the weight turns the sampler's distribution into the trainer's.
    ``token_local``: what becomes of a token depends on that token alone.
    """

    name: str
    fn: Callable[[jax.Array, jax.Array, Batch], tuple[jax.Array, jax.Array]]
    weighs: bool
    token_local: bool


def corrected(
    loss: Loss, *corrections: Correction, denominator: Literal["all", "kept"] = "all"
) -> Loss:
    """``loss`` with each token times the product of the weights, if all corrections keep it.

    They apply after clipping. The sampler (``behavior_logprobs``) is compared to

    - ``scores["proximal"]`` for a loss whose ratio is taken against it (``old="proximal"``);
    - else to the policy itself, as the forward pass has it: right for :func:`reinforce`,
      and for rejections around a loss with ``old="behavior"``.

    At most one weight: a ratio to the sampler, token or sequence truncated importance,
    IcePop and :func:`decoupled_policy_gradient` all correct the same gap, and together
    would square it. ``denominator="all"`` divides by the tokens (or episodes) there were
    before rejection, ``"kept"`` by those left.

    Source: verl's ``rollout_corr_helper.py``, AReaL (the denominator).
    """
    tokens = loss.tokens if isinstance(loss, Loss) else None
    if tokens is None:
        raise ValueError(
            "corrected needs a loss that is a sum over tokens (reinforce, gspo, "
            "clipped_policy_gradient, ...); this one does not expose its tokens"
        )
    if not corrections:
        raise ValueError("corrected needs at least one correction")
    if denominator not in ("all", "kept"):
        raise ValueError(f"denominator must be 'all' or 'kept', got {denominator!r}")
    _check_weights(tokens, corrections)
    inner, proximal = tokens, tokens.old == "proximal"

    def fn(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        losses, mask, metrics = inner.fn(outputs, batch)
        actions = action_mask(batch)
        log_ratio = jax.lax.stop_gradient(
            select(actions, _trainer_logprobs(inner, outputs, batch))
            - select(actions, jnp.asarray(batch.behavior_logprobs))
        )
        weight, keep = jnp.ones_like(log_ratio), mask
        for correction in corrections:
            factor, kept = correction.fn(log_ratio, actions, batch)
            weight, keep = weight * factor, keep & kept
        weight = select(keep, weight)
        count = jnp.sum(mask)
        metrics = {
            **metrics,
            "importance_weight": (jnp.sum(weight), count),
            "kept_fraction": (jnp.sum(keep), count),
        }
        return select(keep, losses) * weight, mask if denominator == "all" else keep, metrics

    def total(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        losses, mask, metrics = fn(outputs, batch)
        return (*inner.reduce(losses, mask, batch), metrics)

    # Weights from the forward pass itself are outputs too: other rows' must not enter them.
    local = denominator == "all" and all(c.token_local for c in corrections)
    weighted = inner.weighted or any(c.weighs for c in corrections)
    return Loss(
        loss.needs | {"logprobs"},
        loss.scores,
        total,
        loss.token_local and (proximal or local),
        TokenLoss(fn, inner.reduce, inner.old, weighted),
    )


def truncated_importance(
    cap: float = 2.0,
    level: Literal["token", "sequence"] = "token",
    low: float = 0.0,
    normalise: bool = False,
) -> Correction:
    """Weight ``clip(w, low, cap)`` (TIS), ``w = exp(log_ratio)``.

    ``level="sequence"`` takes one weight an episode, from the sum over its ACTION tokens.
    ``normalise`` divides by the batch's mean weight, over tokens or over episodes.

    Source: Yao et al. 2025; verl's ``rollout_corr_helper.py``; slime (``low``).
    """
    if not 0 <= low < cap:
        raise ValueError(f"truncated_importance needs 0 <= low < cap, got low={low}, cap={cap}")
    if level not in ("token", "sequence"):
        raise ValueError(f"level must be 'token' or 'sequence', got {level!r}")

    def fn(log_ratio: jax.Array, mask: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        if level == "token":
            weight = jnp.clip(jnp.exp(clamp_log_ratio(log_ratio)), low, cap)
            mean = ratio(jnp.sum(select(mask, weight)), jnp.sum(mask))
        else:
            own = jnp.exp(clamp_log_ratio(episode_sum(batch, log_ratio)))
            own = jnp.clip(own, low, cap)
            some = episode_sum(batch, mask.astype(own.dtype)) > 0
            mean = ratio(jnp.sum(select(some, own)), jnp.sum(some))
            weight = per_token(batch, own)
        if normalise:
            weight = weight / jnp.maximum(mean, 1e-8)
        return weight, mask

    return Correction("truncated_importance", fn, True, level == "token" and not normalise)


def icepop(low: float = 0.5, high: float = 5.0) -> Correction:
    """Weight ``w = exp(log_ratio)`` where ``low <= w <= high``; other tokens are dropped.

    Source: Ling team 2025 (IcePop); slime's ``backends/megatron_utils/loss.py``.
    """
    if not 0 <= low < high:
        raise ValueError(f"icepop needs 0 <= low < high, got low={low}, high={high}")

    def fn(log_ratio: jax.Array, mask: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        weight = jnp.exp(clamp_log_ratio(log_ratio))
        return weight, mask & (weight >= low) & (weight <= high)

    return Correction("icepop", fn, True, True)


def rejection(
    statistic: Literal["k1", "k2", "k3"] = "k1",
    level: RejectionLevel = "token",
    low: float | None = None,
    high: float | None = None,
) -> Correction:
    """Keeps the tokens, or whole episodes, whose mismatch is within bounds; weighs nothing.

    With x = log_ratio the statistics of a token are k1 = -x, k2 = x^2 / 2 and
    k3 = exp(x) - 1 - x. ``level`` takes a token's own, or the sum, mean or maximum over the
    ACTION tokens of its episode. k1 needs both bounds, as ratios: ``low <= exp(-k1) <= high``
    (so ``level="sequence_mean"`` bounds the geometric mean of the ratios); k2 and k3 need
    ``high`` alone, the largest value allowed. Several rejections are ANDed.

    Source: Liu et al. 2025 (masked importance sampling); verl's ``rollout_corr_helper.py``.
    """
    if statistic not in ("k1", "k2", "k3"):
        raise ValueError(f"statistic must be 'k1', 'k2' or 'k3', got {statistic!r}")
    if level not in ("token", "sequence_sum", "sequence_mean", "sequence_max"):
        raise ValueError(
            "level must be 'token', 'sequence_sum', 'sequence_mean' or 'sequence_max', "
            f"got {level!r}"
        )
    if statistic == "k1":
        if level == "sequence_max":
            raise ValueError("k1 has a sign, so its maximum bounds one side only: use k2 or k3")
        if low is None or high is None or not 0 <= low < high:
            raise ValueError(f"k1 needs ratio bounds 0 <= low < high, got low={low}, high={high}")
    elif low is not None or high is None or not high > 0:
        raise ValueError(f"{statistic} needs high=... above 0 and no low, got {low=}, {high=}")
    bounds = (low or 0.0, high)

    def fn(log_ratio: jax.Array, mask: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        if statistic == "k1":
            found = -log_ratio
        elif statistic == "k2":
            found = 0.5 * log_ratio**2
        else:
            clamped = clamp_log_ratio(log_ratio)
            found = jnp.exp(clamped) - 1 - clamped
        found = _per_level(select(mask, found), mask, batch, level)
        if statistic == "k1":
            within = (jnp.log(bounds[0]) <= -found) & (-found <= jnp.log(bounds[1]))
        else:
            within = found <= bounds[1]
        return jnp.ones_like(log_ratio), mask & within

    return Correction("rejection", fn, False, level == "token")


def decoupled_policy_gradient(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cap: float = 5.0,
    mode: Literal["mask", "clamp"] = "mask",
    proximal: Literal["score", "loglinear"] = "score",
    aggregate: Aggregate = "token",
    constant: float | None = None,
    episode_mean: bool | None = None,
) -> Loss:
    """Decoupled PPO: ``w max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))``.

    r is the ratio of the policy to the *proximal* one O, ``w = sg(O / M)`` that of O to the
    sampler M. Weights above ``cap`` are dropped (``mode="mask"``; the denominator stays) or
    set to it (``"clamp"``). ``proximal="score"`` reads O from ``scores["proximal"]``;
    ``"loglinear"`` spares that forward pass: with v the version that drew the token and c
    the one the update starts from,

        log O = log M + a (sg(log p) - log M),  a = clip((c - 1 - v) / (c - v), 0, 1),

    and a = 0 where v >= c or v < 0. The stop-gradient is ours. O and M are what
    :func:`corrected` compares too, so no further weight goes on top.

    Source: Fu et al. 2025 (AReaL), ``areal/utils/functional``; there the weight is only
    applied once rejection is configured, here always.
    """
    if mode not in ("mask", "clamp"):
        raise ValueError(f"mode must be 'mask' or 'clamp', got {mode!r}")
    if proximal not in ("score", "loglinear"):
        raise ValueError(f"proximal must be 'score' or 'loglinear', got {proximal!r}")
    if not cap > 0:
        raise ValueError(f"cap must be above 0, got {cap}")
    weigh = icepop(0.0, cap) if mode == "mask" else truncated_importance(cap)
    sums = (aggregate, constant, episode_mean)
    clipped = clipped_policy_gradient(clip_low, clip_high, None, *sums, old="proximal")
    if proximal == "score":
        return corrected(clipped, weigh)

    def fn(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        return clipped_losses(outputs, batch, _loglinear(outputs, batch), clip_low, clip_high)

    needs = frozenset({"logprobs", "step"})
    return corrected(token_loss(fn, *sums, needs=needs, old="loglinear"), weigh)


def _check_weights(tokens: TokenLoss, corrections: tuple[Correction, ...]) -> None:
    weights = [correction.name for correction in corrections if correction.weighs]
    if tokens.weighted and weights:
        raise ValueError(
            f"{weights[0]} weighs each token by the trainer's probability over the sampler's, "
            "and this loss already does (decoupled_policy_gradient, old='behavior', or an "
            f"earlier correction): the two would square the weight. Drop {weights[0]}, or use "
            "it on a loss with old='proximal'"
        )
    if len(weights) > 1:
        raise ValueError(
            f"{' and '.join(weights)} both weigh each token by the trainer's probability over "
            "the sampler's, which would square the weight: use one"
        )


def _trainer_logprobs(tokens: TokenLoss, outputs: Outputs, batch: Batch) -> jax.Array:
    if tokens.old == "proximal":
        return jnp.asarray(batch.scores["proximal"])
    if tokens.old == "loglinear":
        return _loglinear(outputs, batch)
    return outputs["logprobs"]


def _loglinear(outputs: Outputs, batch: Batch) -> jax.Array:
    """log O [R,T] of :func:`decoupled_policy_gradient`, 0 off the ACTION tokens."""
    mask = action_mask(batch)
    behavior = select(mask, jnp.asarray(batch.behavior_logprobs))
    live = select(mask, jax.lax.stop_gradient(outputs["logprobs"]))
    versions = jnp.asarray(batch.policy_versions)
    stale = mask & (versions >= 0) & (versions < outputs["step"])
    age = jnp.where(stale, outputs["step"] - versions, 1).astype(live.dtype)
    # A token that is not stale has a = 0: O is the sampler.
    return behavior + (age - 1) / age * (live - behavior)


def _per_level(values: jax.Array, mask: jax.Array, batch: Batch, level: str) -> jax.Array:
    """``values`` [R,T], 0 off ``mask``, or what ``level`` makes of each episode's."""
    if level == "token":
        return values
    if level == "sequence_max":
        # k2 and k3 are at least 0, so the zeros off the mask never win.
        return per_token(batch, episode_max(batch, values))
    if level == "sequence_mean":
        return per_token(batch, episode_token_mean(batch, values, mask))
    return per_token(batch, episode_sum(batch, values))
