"""Stops episodes that are about to fail, as a monitor trained on their ends sees it (StopLoss).

The monitor is a head trained with :func:`jaxagent.losses.failure_prediction`. Calibration:
:func:`failure_scores` of finished episodes, the largest of each *successful* one into
:func:`stop_threshold`. Then, after each turn of an episode under way: :func:`should_stop` of
the scores so far.

An episode that was stopped is no failure: nobody saw how it ends. :func:`stopped` makes it a
truncated and masked one, whatever the run does with other truncated episodes. So it gets no
row and no loss, counts in no group's mean, and is no example of failure to the monitor, which
would otherwise teach itself that it was right.

Derived from the abstract of StopLoss; no reproduction is claimed.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from jaxagent.credit.turns import turn_span
from jaxagent.data.batch import Batch, action_mask
from jaxagent.episodes.episode import Episode

STOPPED = "monitor"


def failure_scores(batch: Batch, logits: ArrayLike) -> jax.Array:
    """[E,K]: what the monitor said at the last ACTION token of each turn.

    ``logits`` [R,T] as the head gives them (``scores["failure"]``, or ``outputs``): comparing
    them or their probabilities is the same. Turns that do not exist, and those of invalid
    episodes, have -inf, which stops nothing.
    """
    _, last = turn_span(batch, action_mask(batch))
    found = jnp.asarray(logits).reshape(-1)[jnp.maximum(last, 0)]
    return jnp.where(last >= 0, found, -jnp.inf)


def should_stop(scores_so_far: Sequence[float], threshold: float) -> bool:
    """Whether to abort an episode whose turns so far got these failure scores.

    Any of them above ``threshold`` (from :func:`stop_threshold`, on the same scale) does it.
    Raises ValueError on NaN, which no threshold could stop.
    """
    if math.isnan(threshold) or any(math.isnan(score) for score in scores_so_far):
        raise ValueError("failure scores and their threshold must not be NaN: check the monitor")
    return any(score > threshold for score in scores_so_far)


def stopped(episode: Episode) -> Episode:
    """The episode as one that the monitor aborted: truncated and masked, reward 0."""
    return replace(
        episode, reward=0.0, valid=False, truncated=STOPPED, error="stopped by the monitor"
    )


def stop_threshold(scores: ArrayLike, alpha: float, finite_sample: bool = False) -> float:
    """The score above which a monitor may abort an episode (StopLoss).

    ``scores`` [n]: the largest failure score over all checks of each *successful* calibration
    run. The threshold is the ``ceil((1 - alpha) n)``-th smallest, which keeps at least
    1 - alpha of those runs; ``finite_sample`` takes the ``ceil((1 - alpha)(n + 1))``-th, which
    keeps as much of new runs on average (split conformal), and infinity where there are too
    few runs for that: never abort. The scores of one run: ``failure_scores(...).max()``.
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie between 0 and 1, got {alpha}")
    ordered = np.sort(np.asarray(scores, np.float64).reshape(-1))
    if not ordered.size or np.isnan(ordered).any():
        raise ValueError("scores must hold at least one successful run's score, and no NaN")
    count = ordered.size + (1 if finite_sample else 0)
    # The small term keeps (1 - 0.1) * 30 from counting as 27.000000000000004.
    rank = math.ceil((1 - alpha) * count - 1e-9)
    return math.inf if rank > ordered.size else float(ordered[rank - 1])
