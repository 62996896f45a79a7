"""Advantages relative to the other episodes of the same task."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxagent.credit.base import Credit, CreditMetrics
from jaxagent.data.batch import Batch, per_token


class GroupStats(NamedTuple):
    """Statistics of each member's group, spread back to the members: [E] or [N].

    ``signal``: the group counts two members or more and their values differ.
    """

    size: jax.Array
    mean: jax.Array
    std: jax.Array
    signal: jax.Array


def segment_stats(
    ids: jax.Array, values: jax.Array, counted: jax.Array, bins: int, ddof: int = 1
) -> GroupStats:
    """Count, mean and standard deviation of ``values`` [N] over members with the same id.

    ``ids`` lie in 0..bins-1, in any order; members that are not ``counted`` take no part.
    Where the values of a group are all equal the mean is that value and the deviation 0,
    exactly.
    """
    ids = jnp.asarray(ids)

    def group_sum(x: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(x, ids, num_segments=bins)[ids]

    count = group_sum(counted.astype(values.dtype))
    mean = group_sum(jnp.where(counted, values, 0.0)) / jnp.maximum(count, 1)
    lowest = jax.ops.segment_min(jnp.where(counted, values, jnp.inf), ids, num_segments=bins)[ids]
    highest = jax.ops.segment_max(jnp.where(counted, values, -jnp.inf), ids, num_segments=bins)[ids]
    signal = (count > 1) & (highest > lowest)
    # Equal values can have a mean one rounding away from them: not a difference to learn from.
    mean = jnp.where(signal, mean, jnp.where(count > 0, lowest, 0.0))
    squares = group_sum(jnp.where(counted, (values - mean) ** 2, 0.0))
    std = jnp.sqrt(jnp.where(signal, squares / jnp.maximum(count - ddof, 1), 1.0))
    return GroupStats(count, mean, jnp.where(signal, std, 0.0), signal)


def group_stats(batch: Batch, values: jax.Array, ddof: int = 1) -> GroupStats:
    """Statistics of ``values`` [E] over each episode's group, invalid episodes left out."""
    return segment_stats(
        jnp.asarray(batch.group_ids),
        jnp.asarray(values),
        jnp.asarray(batch.valid),
        batch.num_episodes + 1,
        ddof,
    )


def pooled_scores(
    batch: Batch, values: jax.Array, counted: jax.Array, eps: float = 1e-6
) -> jax.Array:
    """``(x - mean_g) / (std_g + eps)`` of ``values`` [E,K], pooled over all counted turns of a
    group (sample deviation); 0 where they are all equal, and at turns not counted."""
    ids = jnp.broadcast_to(jnp.asarray(batch.group_ids)[:, None], values.shape)
    stats = segment_stats(
        ids.reshape(-1), values.reshape(-1), counted.reshape(-1), batch.num_episodes + 1
    )
    centred = jnp.where(stats.signal, values.reshape(-1) - stats.mean, 0.0)
    return jnp.where(counted, (centred / (stats.std + eps)).reshape(values.shape), 0.0)


def dense_ids(*keys: jax.Array) -> jax.Array:
    """One id in 0..N-1 for each distinct combination of integer ``keys``, [N] each."""
    order = jnp.lexsort(keys[::-1])
    new = jnp.zeros(order.shape, bool)
    for key in keys:
        ordered = key[order]
        new = new | jnp.concatenate([jnp.zeros((1,), bool), ordered[1:] != ordered[:-1]])
    return jnp.zeros(order.shape, jnp.int32).at[order].set(jnp.cumsum(new).astype(jnp.int32))


def group_metrics(batch: Batch, stats: GroupStats) -> dict[str, jax.Array]:
    """Counts over groups with at least one valid episode."""
    valid = jnp.asarray(batch.valid)
    # Each of a group's n episodes stands for 1/n of it.
    share = jnp.where(valid, 1.0 / jnp.maximum(stats.size, 1), 0.0)
    groups = jnp.round(jnp.sum(share))
    return {
        "groups/count": groups,
        "groups/no_signal": groups - jnp.round(jnp.sum(jnp.where(stats.signal, share, 0.0))),
        "groups/reward_mean": jnp.sum(share * stats.mean) / jnp.maximum(groups, 1),
        "groups/reward_std": jnp.sum(share * stats.std) / jnp.maximum(groups, 1),
    }


def group_relative(
    scale: Literal["std", "none"] = "std",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Literal["zero", "reward"] = "zero",
) -> Credit:
    """``(r - mean_g) / (std_g + eps)`` (GRPO), or ``r - mean_g`` with ``scale="none"`` (Dr. GRPO).

    ``ddof=1`` is the sample deviation, as torch and verl compute it. Groups whose rewards
    are all equal get exactly 0, and so do groups of one unless ``singleton="reward"``
    (verl's behaviour: the raw reward). Invalid episodes take no part.

    Source: Shao et al. 2024; Liu et al. 2025; verl's ``compute_grpo_outcome_advantage``.
    """
    if scale not in ("std", "none"):
        raise ValueError(f"scale must be 'std' or 'none', got {scale!r}")
    if ddof not in (0, 1):
        raise ValueError(f"ddof must be 0 or 1, got {ddof}")
    if not eps > 0:
        raise ValueError(f"eps must be above 0, got {eps}")
    if singleton not in ("zero", "reward"):
        raise ValueError(f"singleton must be 'zero' or 'reward', got {singleton!r}")

    def fn(batch: Batch, advantages: jax.Array) -> tuple[jax.Array, CreditMetrics]:
        rewards = jnp.asarray(batch.rewards)
        stats = group_stats(batch, rewards, ddof)
        centred = jnp.where(stats.signal, rewards - stats.mean, 0.0)
        values = centred / (stats.std + eps) if scale == "std" else centred
        if singleton == "reward":
            values = jnp.where(stats.size == 1, rewards, values)
        return _spread(batch, values), group_metrics(batch, stats)

    return Credit(fn, stage="base")


def leave_one_out() -> Credit:
    """Reward minus the mean of the *other* episodes of the group (RLOO).

    Equals ``G / (G - 1) * (r - mean_g)``. Groups of one, and of equal rewards, get 0.
    Source: Ahmadian et al. 2024; verl's ``compute_rloo_outcome_advantage``.
    """

    def fn(batch: Batch, advantages: jax.Array) -> tuple[jax.Array, CreditMetrics]:
        rewards = jnp.asarray(batch.rewards)
        stats = group_stats(batch, rewards)
        factor = stats.size / jnp.maximum(stats.size - 1, 1)
        values = jnp.where(stats.signal, factor * (rewards - stats.mean), 0.0)
        return _spread(batch, values), group_metrics(batch, stats)

    return Credit(fn, stage="base")


def lowered_baseline(share: float = 0.2) -> Credit:
    """``r - share * mean_g``: between successes only (0) and Dr. GRPO (1).

    With a full baseline most of the gradient's variance comes from failures, whose unlikely
    tokens have large gradients of any direction; a lowered one leans on the successes, and
    groups that solve their task keep a signal. On-policy the expected gradient of a sum over
    tokens is the same for every share. Groups without any reward get 0.

    Source: Arnal et al. 2025, arXiv:2506.20520 (asymmetric REINFORCE); share 0 is RAFT
    (Xiong et al. 2025, arXiv:2504.11343).
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must lie in 0..1, got {share}")

    def fn(batch: Batch, advantages: jax.Array) -> tuple[jax.Array, CreditMetrics]:
        rewards = jnp.asarray(batch.rewards)
        stats = group_stats(batch, rewards)
        return _spread(batch, rewards - share * stats.mean), group_metrics(batch, stats)

    return Credit(fn, stage="base")


def _spread(batch: Batch, values: jax.Array) -> jax.Array:
    """[E] to [R,T], 0 for invalid episodes."""
    return per_token(batch, jnp.where(jnp.asarray(batch.valid), values, 0.0))
