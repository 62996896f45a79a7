"""Turns as the unit of reward and return."""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxagent.credit.base import Credit, CreditMetrics
from jaxagent.credit.group import group_metrics, group_stats, pooled_scores
from jaxagent.data.batch import Batch, last_turn_mask, per_turn_token, turn_mask

# Which rewards a method sums up, so that the outcome is in exactly once.
RewardSource = Literal["turns", "outcome", "both"]


def check_source(rewards: str) -> None:
    """Raises ValueError unless ``rewards`` names a :data:`RewardSource`."""
    if rewards not in ("turns", "outcome", "both"):
        raise ValueError(f"rewards must be 'turns', 'outcome' or 'both', got {rewards!r}")


def check_discount(name: str, value: float) -> None:
    """Raises ValueError unless ``value`` lies in 0..1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must lie in 0..1, got {value}")


def rewards_by_turn(batch: Batch, rewards: RewardSource) -> jax.Array:
    """[E,K]: the rewards of each turn, 0 where there is no turn.

    - ``"turns"``: ``batch.turn_rewards`` as they are. Those of an environment add up to the
      outcome, so they hold it already;
    - ``"outcome"``: ``batch.rewards`` at the last turn and nothing else;
    - ``"both"``: ``batch.rewards`` added at the last turn, for turn rewards that a reward
      transform put in the place of the environment's and that leave the outcome out.
    """
    given = jnp.asarray(batch.turn_rewards)
    outcome = jnp.where(last_turn_mask(batch), jnp.asarray(batch.rewards)[:, None], 0.0)
    if rewards == "outcome":
        return outcome
    turns = jnp.where(turn_mask(batch), given, 0.0)
    return turns + outcome if rewards == "both" else turns


def turn_span(batch: Batch, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first and the last token of each turn in ``mask`` [R,T], as indices into [R*T].

    [E,K] each; where a turn has no such token, the first is R*T and the last -1. A turn lies
    in one context, so in one row.
    """
    episodes, turns = jnp.asarray(batch.episode_ids), jnp.asarray(batch.turn_ids)
    shape = (batch.num_episodes, batch.num_turns)
    count = batch.num_episodes * batch.num_turns
    inside = mask & (turns >= 0) & (turns < batch.num_turns) & (episodes < batch.num_episodes)
    ids = jnp.where(inside, episodes * batch.num_turns + turns, count).reshape(-1)
    places = jnp.arange(ids.size)
    first = jax.ops.segment_min(places, ids, num_segments=count + 1)[:count]
    last = jax.ops.segment_max(places, ids, num_segments=count + 1)[:count]
    return jnp.minimum(first, ids.size).reshape(shape), jnp.maximum(last, -1).reshape(shape)


def discounted(rewards: jax.Array, turns: jax.Array, gamma: float) -> jax.Array:
    """[E,K]: ``G_k = r_k + gamma * G_{k+1}`` over the turns that exist (``turns`` [E,K] bool)."""

    def back(later: jax.Array, turn: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        reward, exists = turn
        here = jnp.where(exists, reward + gamma * later, later)
        return here, jnp.where(exists, here, 0.0)

    start = jnp.zeros(rewards.shape[0], rewards.dtype)
    _, returns = jax.lax.scan(back, start, (rewards.T, turns.T), reverse=True)
    return returns.T


def turn_returns(
    gamma: float = 1.0,
    normalise: Literal["none", "group", "group_rewards"] = "none",
    rewards: RewardSource = "turns",
    eps: float = 1e-6,
) -> Credit:
    """The discounted sum of rewards from a turn on, ``G_k = sum_j>=k gamma^(j-k) r_j``, on its
    tokens. The discount counts turns, not tokens.

    ``rewards``: see :func:`rewards_by_turn`. ``normalise``:

    - ``"none"``: the returns as they are;
    - ``"group"``: ``(G - mean_g) / (std_g + eps)`` pooled over all turns of the group's valid
      episodes, sample deviation (GTPO);
    - ``"group_rewards"``: the rewards so normalised, then summed (SIOP; IGPO as recommended).

    Where all turns of a group have the same value, or there is one, it gives 0.

    Source: GTPO [derived from the abstract; the pool is our choice]; SIOP's reuse of IGPO,
    ``core_algos.py``, for ``"group_rewards"``.
    """
    check_discount("gamma", gamma)
    check_source(rewards)
    if normalise not in ("none", "group", "group_rewards"):
        raise ValueError(f"normalise must be 'none', 'group' or 'group_rewards', got {normalise!r}")
    if not eps > 0:
        raise ValueError(f"eps must be above 0, got {eps}")

    def fn(batch: Batch, advantages: jax.Array) -> tuple[jax.Array, CreditMetrics]:
        turns = turn_mask(batch)
        values = rewards_by_turn(batch, rewards)
        if normalise == "group_rewards":
            values = pooled_scores(batch, values, turns, eps)
        values = discounted(values, turns, gamma)
        if normalise == "group":
            values = pooled_scores(batch, values, turns, eps)
        stats = group_stats(batch, jnp.asarray(batch.rewards))
        return per_turn_token(batch, values), group_metrics(batch, stats)

    return Credit(fn, stage="base")
