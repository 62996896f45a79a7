"""Advantages relative to the other episodes of the same task."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxagent.credit.base import Credit, CreditMetrics
from jaxagent.data.batch import Batch, per_token


class GroupStats(NamedTuple):
    """Statistics of each episode's group over its valid episodes, all [E].

    ``signal``: the group has two valid episodes or more and their values differ.
    """

    size: jax.Array
    mean: jax.Array
    std: jax.Array
    signal: jax.Array


def group_stats(batch: Batch, values: jax.Array, ddof: int = 1) -> GroupStats:
    """Group count, mean and standard deviation of ``values`` [E], spread back to episodes.

    Groups come from ``group_ids`` alone, in any order. Where the values of a group are all
    equal the mean is that value and the deviation 0, exactly.
    """
    bins = batch.num_episodes + 1
    ids = jnp.asarray(batch.group_ids)
    valid = jnp.asarray(batch.valid)
    values = jnp.asarray(values)

    def group_sum(x: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(x, ids, num_segments=bins)[ids]

    count = group_sum(valid.astype(values.dtype))
    mean = group_sum(jnp.where(valid, values, 0.0)) / jnp.maximum(count, 1)
    lowest = jax.ops.segment_min(jnp.where(valid, values, jnp.inf), ids, num_segments=bins)[ids]
    highest = jax.ops.segment_max(jnp.where(valid, values, -jnp.inf), ids, num_segments=bins)[ids]
    signal = (count > 1) & (highest > lowest)
    # Equal values can have a mean one rounding away from them: not a difference to learn from.
    mean = jnp.where(signal, mean, jnp.where(count > 0, lowest, 0.0))
    squares = group_sum(jnp.where(valid, (values - mean) ** 2, 0.0))
    std = jnp.sqrt(jnp.where(signal, squares / jnp.maximum(count - ddof, 1), 1.0))
    return GroupStats(count, mean, jnp.where(signal, std, 0.0), signal)


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

    return Credit(fn)


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

    return Credit(fn)


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

    return Credit(fn)


def _spread(batch: Batch, values: jax.Array) -> jax.Array:
    """[E] to [R,T], 0 for invalid episodes."""
    return per_token(batch, jnp.where(jnp.asarray(batch.valid), values, 0.0))
