"""Reward transforms, applied before credit: ``batch -> (batch, metrics)``, pure functions."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxagent.data.batch import Batch, action_mask, episode_sum
from jaxagent.episodes.episode import Episode
from jaxagent.losses.base import select
from jaxagent.losses.policy import OldPolicy, old_logprobs, old_scores

RewardTransform = Callable[[Batch], tuple[Batch, dict[str, jax.Array]]]


def overlong_penalty(max_length: int, buffer: int, factor: float = 1.0) -> RewardTransform:
    """Subtracts a penalty that grows over the last ``buffer`` of ``max_length`` sampled tokens.

    ``r += factor * min(0, (max_length - buffer - length) / buffer)``, the length being the
    episode's ACTION tokens; not bounded beyond ``max_length``. Source: DAPO, as in verl's
    ``reward_manager/dapo.py``.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer must be in 1..max_length={max_length}, got {buffer}")
    if not factor > 0:
        raise ValueError(f"factor must be above 0, got {factor}")

    def transform(batch: Batch) -> tuple[Batch, dict[str, jax.Array]]:
        rewards = jnp.asarray(batch.rewards)
        lengths = episode_sum(batch, action_mask(batch).astype(rewards.dtype))
        penalty = factor * jnp.minimum((max_length - buffer - lengths) / buffer, 0.0)
        valid = jnp.asarray(batch.valid)
        penalised = jnp.sum(valid & (penalty < 0)) / jnp.maximum(jnp.sum(valid), 1)
        shaped = with_rewards(batch, jnp.where(valid, rewards + penalty, rewards))
        return shaped, {"rewards/overlong_fraction": penalised}

    return transform


def kl_in_reward(beta: float, old: OldPolicy = "behavior") -> RewardTransform:
    """Subtracts ``beta`` times the k1 estimate of KL(old || reference), summed over the episode.

    Reads ``scores["reference"]``. Never together with
    :func:`jaxagent.losses.regularizers.kl_to_reference`. Source: verl's ``apply_kl_penalty``
    followed by the outcome sum.
    """
    if not beta > 0:
        raise ValueError(f"beta must be above 0, got {beta}")
    needed = old_scores(old) | {"reference"}

    def transform(batch: Batch) -> tuple[Batch, dict[str, jax.Array]]:
        missing = needed - set(batch.scores)
        if missing:
            raise ValueError(f"kl_in_reward needs the score {', '.join(sorted(missing))}")
        mask = action_mask(batch)
        k1 = select(mask, old_logprobs(batch, old)) - select(
            mask, jnp.asarray(batch.scores["reference"])
        )
        shaped = with_rewards(batch, jnp.asarray(batch.rewards) - beta * episode_sum(batch, k1))
        return shaped, {"rewards/kl": jnp.sum(k1) / jnp.maximum(jnp.sum(mask), 1)}

    return transform


def has_signal(rewards: Sequence[float], valid: Sequence[bool]) -> bool:
    """Whether a group has two valid episodes whose raw outcomes differ."""
    kept = np.asarray(rewards, np.float64)[np.asarray(valid, np.bool_)]
    return kept.size > 1 and bool(kept.min() < kept.max())


def drop_flat_groups(
    groups: Sequence[Sequence[Episode]],
) -> tuple[list[Sequence[Episode]], int]:
    """DAPO's dynamic sampling on the host: the groups with signal, and how many had none.

    Filter raw outcomes, before any shaping. If nothing is left, sample more groups or skip
    the update.
    """
    kept = [g for g in groups if has_signal([e.reward for e in g], [e.valid for e in g])]
    return kept, len(groups) - len(kept)


def required_extra(batch: Batch, name: str, method: str) -> jax.Array:
    """``batch.extras[name]``; ValueError where the batch lacks it."""
    if name not in batch.extras:
        raise ValueError(f"{method} needs the extra {name}: add it with batch.with_extra")
    return jnp.asarray(batch.extras[name])


def with_rewards(batch: Batch, rewards: jax.Array) -> Batch:
    """The batch with other ``rewards`` [E]."""
    shaped: Batch = batch.replace(rewards=rewards)  # type: ignore[attr-defined]
    return shaped
