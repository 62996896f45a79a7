"""Exploration bonuses, and stages of a reverse curriculum.

Bonuses belong to training rewards alone: never to those an evaluation reports. Add them
before any normalisation. What has to last over updates is a plain value, passed in and out.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxagent.credit.group import dense_ids, segment_stats
from jaxagent.credit.rewards import RewardTransform, required_extra, with_rewards
from jaxagent.data.batch import Batch

# How often each outcome of each task came up: {(task, outcome): count}.
OutcomeCounts = Mapping[tuple[str, Hashable], int]
T = TypeVar("T")


def count_outcomes(
    counts: OutcomeCounts, tasks: Sequence[str], outcomes: Sequence[Hashable]
) -> dict[tuple[str, Hashable], int]:
    """``counts`` with one more for each episode; an outcome of None is not counted."""
    found = dict(counts)
    for key in zip(tasks, outcomes, strict=True):
        if key[1] is not None:
            found[key] = found.get(key, 0) + 1
    return found


def historical_bonus(
    counts: OutcomeCounts,
    tasks: Sequence[str],
    outcomes: Sequence[Hashable],
    scale: float,
    groups: Sequence[int] | None = None,
) -> NDArray[np.float64]:
    """``scale / sqrt(N(task, outcome))`` for each episode [n]; 0 where the outcome is None.

    Count the episodes first (:func:`count_outcomes`), so that N is at least 1. With ``groups``
    the mean bonus of an episode's group, over those with an outcome, is taken off. Add it by
    :func:`with_bonus`.

    Source: outcome-based exploration, from its abstract; formula from memory.
    """
    if not scale > 0:
        raise ValueError(f"scale must be above 0, got {scale}")
    bonus = np.zeros(len(tasks))
    some = np.asarray([outcome is not None for outcome in outcomes], np.bool_)
    for index, key in enumerate(zip(tasks, outcomes, strict=True)):
        if some[index]:
            bonus[index] = scale / math.sqrt(max(counts.get(key, 0), 1))
    if groups is not None:
        if len(groups) != len(tasks):
            raise ValueError(f"{len(tasks)} episodes, but {len(groups)} groups")
        for group in set(groups):
            own = some & (np.asarray(groups) == group)
            if own.any():
                bonus[own] -= bonus[own].mean()
    return bonus


def with_bonus(batch: Batch, bonus: ArrayLike) -> Batch:
    """The batch with ``bonus`` [n] added to the rewards of its first n episodes, if valid."""
    given = np.asarray(bonus)
    if given.ndim != 1 or len(given) > batch.num_episodes:
        raise ValueError(
            f"bonus must be [n] with n up to the batch's {batch.num_episodes} episodes, "
            f"got shape {given.shape}"
        )
    rewards = jnp.asarray(batch.rewards)
    padded = jnp.zeros_like(rewards).at[: len(given)].set(given)
    return with_rewards(batch, rewards + jnp.where(jnp.asarray(batch.valid), padded, 0.0))


def batch_bonus(scale: float) -> RewardTransform:
    """``r += -scale / G * (other episodes of the group with the same outcome)``.

    ``extras["outcome_ids"]`` [E], one id for each distinct outcome of a group, negative where
    there is none (no penalty); G counts the group's valid episodes.

    Source: outcome-based exploration, from its abstract; formula from memory.
    """
    if not scale > 0:
        raise ValueError(f"scale must be above 0, got {scale}")

    def transform(batch: Batch) -> tuple[Batch, dict[str, jax.Array]]:
        outcomes = required_extra(batch, "outcome_ids", "batch_bonus")
        groups = jnp.asarray(batch.group_ids)
        valid = jnp.asarray(batch.valid)
        rewards = jnp.asarray(batch.rewards)
        some = valid & (outcomes >= 0)
        bins = batch.num_episodes + 1
        same = segment_stats(dense_ids(groups, outcomes), rewards, some, bins).size
        size = segment_stats(groups, rewards, valid, bins).size
        penalty = jnp.where(some, scale * (same - 1) / jnp.maximum(size, 1), 0.0)
        return with_rewards(batch, rewards - penalty), {}

    return transform


def stage_groups(groups: Sequence[str], stages: Sequence[int]) -> list[str]:
    """Group ids by (group, stage): episodes that start at different stages of a demonstration
    are never compared (R3). For ``Episode.group_id``, before packing."""
    return [f"{group}@stage{stage}" for group, stage in zip(groups, stages, strict=True)]


def demonstration_prefix(steps: Sequence[T], stage: int) -> Sequence[T]:
    """The steps that stage ``stage`` starts after: all but the last ``stage`` (R3).

    They are prompt, not action. Stage ``len(steps)`` starts from the task alone.
    Source: Xi et al. 2024 (R3), arXiv:2402.05808.
    """
    if not 0 <= stage <= len(steps):
        raise ValueError(f"stage must lie in 0..{len(steps)}, the demonstration's steps: {stage}")
    return steps[: len(steps) - stage]
