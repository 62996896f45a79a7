"""Turn rewards from how much more likely a turn made the right answer."""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxagent.credit.base import Credit, CreditMetrics
from jaxagent.credit.group import dense_ids, group_metrics, group_stats, segment_stats
from jaxagent.credit.rewards import RewardTransform, required_extra
from jaxagent.credit.turns import RewardSource, check_source, rewards_by_turn
from jaxagent.data.batch import (
    Batch,
    action_mask,
    last_turn_mask,
    per_token,
    per_turn_token,
    token_order,
    turn_mask,
)


def information_gain(final: Literal["outcome", "gain"] = "outcome") -> RewardTransform:
    """Replaces the turn rewards by the gain in the gold answer's probability (IGPO).

    ``r_k = u_{k+1} - u_k`` with ``u = exp(extras["gold_logprobs"])`` [E,K+1], the mean
    log-probability of the gold answer's tokens before turn 0 and after each turn. The last
    turn, which gives the answer, has the outcome as its reward (``final="outcome"``, IGPO) or
    its gain like any other.

    Follow it with ``turn_returns(gamma, normalise="group_rewards")`` (recommended; IGPO's
    later code does so) or :func:`position_relative` (as first released).
    Source: Wang et al. 2025, arXiv:2510.14967; IGPO, ``scrl/llm_agent/generation.py``.
    """
    if final not in ("outcome", "gain"):
        raise ValueError(f"final must be 'outcome' or 'gain', got {final!r}")

    def transform(batch: Batch) -> tuple[Batch, dict[str, jax.Array]]:
        before, after = _boundaries(batch, "gold_logprobs", "information_gain")
        gains = jnp.exp(after) - jnp.exp(before)
        if final == "outcome":
            gains = jnp.where(last_turn_mask(batch), jnp.asarray(batch.rewards)[:, None], gains)
        return _with_turn_rewards(batch, gains), {}

    return transform


def position_relative(rewards: RewardSource = "turns") -> Credit:
    """A turn's own reward minus the group's mean *at the same token position*.

    The estimator that IGPO first released: the running return is reset at every token the
    policy did not sample, so that no turn sees what came after it; the mean at a position,
    counted from the end of the prompt, runs over all valid episodes of the group, with 0 for
    those that have no sampled token there. Here for comparison; prefer
    ``turn_returns(normalise="group_rewards")``. A group of one gets 0.

    Source: IGPO, ``verl/trainer/ppo/core_algos.py``, with its fixed discount of 1.
    """
    check_source(rewards)

    def fn(batch: Batch, advantages: jax.Array) -> tuple[jax.Array, CreditMetrics]:
        mask = action_mask(batch)
        values = jnp.where(mask, per_turn_token(batch, rewards_by_turn(batch, rewards)), 0.0)
        own_group = group_stats(batch, jnp.asarray(batch.rewards))
        groups = per_token(batch, jnp.asarray(batch.group_ids)).reshape(-1)
        ids = dense_ids(groups, _places(batch).reshape(-1))
        stats = segment_stats(ids, values.reshape(-1), mask.reshape(-1), ids.size)
        members = jnp.maximum(per_token(batch, own_group.size), 1).reshape(-1)
        everywhere_equal = ~stats.signal & (stats.size == members)
        mean = jnp.where(everywhere_equal, stats.mean, stats.mean * stats.size / members)
        found = values - mean.reshape(mask.shape)
        return jnp.where(mask, found, 0.0), group_metrics(batch, own_group)

    return Credit(fn, stage="base")


def log_ratio_td(gamma: float = 1.0) -> RewardTransform:
    """Replaces the turn rewards by ``r_k = gamma v_{k+1} - v_k``, ``v_k = l_k - l_0`` (TRACE).

    ``l`` is ``extras["gold_logprobs"]`` [E,K+1]: the log-probability of the gold answer under
    a frozen reference before turn 0 and after each turn, a mean or a sum over its tokens as
    it was scored. With gamma 1 the rewards add up to ``l_K - l_0``, and a turn that changes
    nothing gets 0. Leaves the outcome out: follow it with
    ``turn_returns(normalise="group_rewards", rewards="both")``.

    Derived from the abstract of TRACE; "log-ratio" could also be meant as log(l_0 / l_k).
    """
    if not 0 < gamma <= 1:
        raise ValueError(f"gamma must lie in 0..1 (0 excluded), got {gamma}")

    def transform(batch: Batch) -> tuple[Batch, dict[str, jax.Array]]:
        before, after = _boundaries(batch, "gold_logprobs", "log_ratio_td")
        start = jnp.where(turn_mask(batch), before[:, :1], 0.0)
        return _with_turn_rewards(batch, gamma * (after - start) - (before - start)), {}

    return transform


def evidence_gain(
    outcome_weight: float = 0.5, eta: float = 0.0, floor: float = 1e-8
) -> RewardTransform:
    """Replaces the turn rewards by gains in the log-probability of the own answer (SIOP).

    ``r_k = q (log(p_{k+1} + floor) - log(p_k + floor))``, and the last turn also gets
    ``outcome_weight * q`` (1 - lambda in the source). ``p`` is ``extras["evidence"]`` [E,K+1],
    the probability of the episode's own final answer before turn 0 and after each turn, and q
    the share of the group's answers that say the same: ``extras["outcome_ids"]`` [E], one id a
    cluster of equal answers, negative where there is no answer (no rewards at all). ``eta``
    above 0 makes ``q`` proportional to ``share * exp(eta * s)``, s the cluster's mean of
    ``extras["support"]`` [E]. An episode of one turn gets ``outcome_weight * q`` alone.

    No label is used. Follow it with ``turn_returns(normalise="group_rewards")``.
    Source: SIOP, ``verl/utils/siop/siop_process_reward.py``.
    """
    if not 0 <= outcome_weight <= 1:
        raise ValueError(f"outcome_weight must lie in 0..1, got {outcome_weight}")
    if not eta >= 0:
        raise ValueError(f"eta must be at least 0, got {eta}")
    if not floor > 0:
        raise ValueError(f"floor must be above 0, got {floor}")

    def transform(batch: Batch) -> tuple[Batch, dict[str, jax.Array]]:
        before, after = _boundaries(batch, "evidence", "evidence_gain")
        share = _answer_share(batch, eta)[:, None]
        turns = turn_mask(batch)
        several = jnp.sum(turns, axis=1, keepdims=True) > 1
        gains = share * (jnp.log(after + floor) - jnp.log(before + floor))
        rewards = jnp.where(several, gains, 0.0)
        rewards = rewards + jnp.where(last_turn_mask(batch), outcome_weight * share, 0.0)
        return _with_turn_rewards(batch, rewards), {}

    return transform


def _answer_share(batch: Batch, eta: float) -> jax.Array:
    """[E]: q of each episode's answer; 0 without one."""
    answers = required_extra(batch, "outcome_ids", "evidence_gain")
    answered = jnp.asarray(batch.valid) & (answers >= 0)
    dtype = jnp.asarray(batch.turn_rewards).dtype
    groups = jnp.asarray(batch.group_ids)
    bins = batch.num_episodes + 1
    clusters = dense_ids(groups, answers)
    ones = answered.astype(dtype)
    same = segment_stats(clusters, ones, answered, bins).size
    total = segment_stats(groups, ones, answered, bins).size
    share = jnp.where(answered, same / jnp.maximum(total, 1), 0.0)
    if eta == 0:
        return share
    support = required_extra(batch, "support", "evidence_gain").astype(dtype)
    logits = eta * segment_stats(clusters, support, answered, bins).mean
    top = jax.ops.segment_max(jnp.where(answered, logits, -jnp.inf), groups, num_segments=bins)
    weight = jnp.where(answered, jnp.exp(logits - jnp.where(answered, top[groups], 0.0)), 0.0)
    # Summed over episodes, each cluster is in once for each of its members: that is its share.
    normaliser = jax.ops.segment_sum(weight, groups, num_segments=bins)[groups]
    return jnp.where(answered, weight * same / jnp.where(answered, normaliser, 1.0), 0.0)


def _places(batch: Batch) -> jax.Array:
    """[R,T]: how many tokens of the episode after its prompt come before this one."""
    inside = (jnp.asarray(batch.turn_ids) >= 0) & per_token(batch, jnp.asarray(batch.valid))
    order = token_order(batch, inside)
    bins = batch.num_episodes + 1
    episode = jnp.where(inside, jnp.asarray(batch.episode_ids), batch.num_episodes)
    ordered = episode.reshape(-1)[order]
    index = jnp.arange(order.size)
    first = jax.ops.segment_min(index, ordered, num_segments=bins)[ordered]
    return jnp.zeros_like(index).at[order].set(index - first).reshape(inside.shape)


def _boundaries(batch: Batch, name: str, method: str) -> tuple[jax.Array, jax.Array]:
    """``extras[name]`` before and after each turn, [E,K] each, 0 where there is no turn."""
    values = required_extra(batch, name, method)
    wanted = (batch.num_episodes, batch.num_turns + 1)
    if values.shape != wanted:
        raise ValueError(
            f"{method} needs extras[{name!r}] of shape [E,K+1] = {wanted}, one value before the "
            f"first turn and one after each; got {values.shape}"
        )
    turns = turn_mask(batch)
    return jnp.where(turns, values[:, :-1], 0.0), jnp.where(turns, values[:, 1:], 0.0)


def _with_turn_rewards(batch: Batch, rewards: jax.Array) -> Batch:
    rewards = jnp.where(turn_mask(batch), rewards, 0.0)
    shaped: Batch = batch.replace(turn_rewards=rewards)  # type: ignore[attr-defined]
    return shaped
