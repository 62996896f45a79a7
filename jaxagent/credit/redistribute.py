"""Moves an episode's credit between its turns: multiplicative, sign and sum stay."""

import math

import jax
import jax.numpy as jnp

from jaxagent.credit.base import Credit, CreditMetrics
from jaxagent.data.batch import (
    Batch,
    action_mask,
    episode_max,
    episode_sum,
    per_token,
    per_turn_token,
    turn_mask,
    turn_sum,
)
from jaxagent.losses.base import ratio, select
from jaxagent.losses.policy import OldPolicy, old_scores
from jaxagent.losses.teachers import teacher_gap, teacher_score


def progress_redistribution(tau: float) -> Credit:
    """Credits turns by the progress they made towards the end of the task (DeltaTTG).

    With D = ``extras["meter"]`` [E,K+1], the tokens still to go before turn 0 and after each
    turn as a frozen meter predicts them, ``d_k = D_k - D_{k+1}``,
    ``v_k = exp(sign(A) d_k / tau)`` and ``u_k = v_k sum n / sum(n v)``, n the turn's sampled
    tokens: ``A_k <- A_k u_k``. Signs and the token mean of the episode stay as they are; where
    the base gave an episode tokens of both signs, the tokens of each sign share their own sum.

    Derived from the abstract of DeltaTTG: the exponential and tau are ours.
    """
    if not tau > 0:
        raise ValueError(f"tau must be above 0, got {tau}")

    def fn(batch: Batch, advantages: jax.Array) -> tuple[jax.Array, CreditMetrics]:
        meter = jnp.asarray(batch.extras["meter"])
        progress = jnp.where(turn_mask(batch), meter[:, :-1] - meter[:, 1:], 0.0)
        weights = jnp.sign(advantages) * per_turn_token(batch, progress) / tau
        return _redistribute(batch, advantages, weights), {}

    return Credit(fn, extras=frozenset({"meter"}), stage="multiplicative")


def belief_redistribution(
    name: str,
    beta: float = 1.0,
    low: float = 0.5,
    high: float = 2.0,
    length_norm: bool = False,
    old: OldPolicy = "behavior",
) -> Credit:
    """Credits turns by how much they speak for the answer a teacher was told (PBSD).

    ``s_k = sum over turn k of (H - O)``, H = ``scores["teacher/<name>"]`` of the policy given
    privileged context and O the old policy's: by Bayes' rule the log evidence of the turn's
    actions for that context, the environment's own factors cancelling.
    ``u_k = clip(exp(sign(A) beta s_k), low, high)``, scaled to a token mean of 1 over the
    episode: ``A_k <- A_k u_k``. ``length_norm`` takes the mean over the turn's covered tokens
    instead of the sum, which grows with the turn. Tokens of both signs: see
    :func:`progress_redistribution`.

    Derived from the abstract of PBSD.
    """
    if not beta > 0:
        raise ValueError(f"beta must be above 0, got {beta}")
    if not 0 < low < 1 < high:
        raise ValueError(f"low and high must satisfy 0 < low < 1 < high, got {low} and {high}")
    scores = old_scores(old) | {teacher_score(name)}

    def fn(batch: Batch, advantages: jax.Array) -> tuple[jax.Array, CreditMetrics]:
        gap, covered = teacher_gap(batch, name, old)
        evidence = turn_sum(batch, gap)
        if length_norm:
            evidence = ratio(evidence, turn_sum(batch, covered.astype(gap.dtype)))
        weights = jnp.sign(advantages) * beta * per_turn_token(batch, evidence)
        weights = jnp.clip(weights, math.log(low), math.log(high))
        return _redistribute(batch, advantages, weights), {}

    return Credit(fn, scores, stage="multiplicative")


def _redistribute(batch: Batch, advantages: jax.Array, log_weights: jax.Array) -> jax.Array:
    """``A exp(w)``, scaled so that the positive and the negative advantages of every episode
    each keep their sum."""
    mask = action_mask(batch)
    advantages = select(mask, advantages)
    log_weights = select(mask, log_weights)
    found = jnp.zeros_like(advantages)
    for sign in (1, -1):
        own = sign * advantages > 0
        share = jnp.where(own, jnp.abs(advantages), 0.0)
        # Relative to the episode's largest weight, so that none overflows.
        top = per_token(batch, episode_max(batch, jnp.where(own, log_weights, -jnp.inf)))
        weighted = share * jnp.exp(jnp.where(own, log_weights - top, 0.0))
        scale = ratio(episode_sum(batch, share), episode_sum(batch, weighted))
        found = found + sign * weighted * per_token(batch, scale)
    return found
