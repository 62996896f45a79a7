"""Preferences between two continuations of the same state, both in the batch as episodes.

Derived from the abstract of OVCSD; no reproduction is claimed. There the state is the first
point at which a teacher's verified solution and the student's attempt part ways. Which
pairs and suffixes are verified is the business of whoever writes the scores.
"""

import jax
import jax.numpy as jnp

from jaxagent.data.batch import Batch, action_mask
from jaxagent.losses.base import (
    Aggregate,
    Loss,
    Metrics,
    Outputs,
    select,
    token_loss,
)


def preference(beta: float = 1.0) -> Loss:
    """``-log sigmoid(beta (S+ - S-))``, the mean over pairs. Derived.

    ``scores["preference"]`` [R,T] holds i on the ACTION tokens of the preferred action of
    pair i = 1, 2, ..., -i on those of the other action, and 0 elsewhere; S+ and S- are the
    sums of log-probabilities over them. Pairs of which a side is missing (or in an invalid
    episode) do not count.
    """
    if not beta > 0:
        raise ValueError(f"beta must be above 0, got {beta}")

    def fn(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        marks = jnp.asarray(batch.scores["preference"])
        marks = select(action_mask(batch), marks).astype(jnp.int32).reshape(-1)
        logprobs = select(marks != 0, outputs["logprobs"].reshape(-1))
        # A pair takes two tokens at least; bin 0 holds the tokens of none.
        bins = marks.size // 2 + 1

        def sums(side: jax.Array, values: jax.Array) -> jax.Array:
            ids = jnp.where(side, jnp.abs(marks), 0)
            return jax.ops.segment_sum(select(side, values), ids, num_segments=bins)

        better, worse = marks > 0, marks < 0
        ones = jnp.ones_like(logprobs)
        pairs = (sums(better, ones) > 0) & (sums(worse, ones) > 0)
        margin = select(pairs, sums(better, logprobs) - sums(worse, logprobs))
        losses = select(pairs, jax.nn.softplus(-beta * margin))
        count = jnp.sum(pairs)
        metrics = {"pairs": count, "accuracy": (jnp.sum(pairs & (margin > 0)), count)}
        return jnp.sum(losses), count, metrics

    return Loss(frozenset({"logprobs"}), frozenset({"preference"}), fn)


def marked_cross_entropy(
    score: str,
    aggregate: Aggregate = "token",
    constant: float | None = None,
    episode_mean: bool | None = None,
) -> Loss:
    """Negative log-likelihood of the ACTION tokens where ``scores[score]`` is above 0. Derived.

    OVCSD's second term, with a score that marks what the teacher did after the divergence.
    """
    if not score or not isinstance(score, str):
        raise ValueError(f"score must name an entry of batch.scores, got {score!r}")

    def fn(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        mask = action_mask(batch) & (jnp.asarray(batch.scores[score]) > 0)
        return -select(mask, outputs["logprobs"]), mask, {"tokens": jnp.sum(mask)}

    scores = frozenset({score})
    return token_loss(fn, aggregate, constant, episode_mean, scores=scores)
