"""Credit assignment: pure functions ``(batch, advantages) -> (advantages, metrics)``.

``advantages`` is [R,T]. A base method (``group_relative`` ...) ignores what it is given
and starts afresh; the others shift, scale or bound it. All work inside jit as well as on
NumPy batches, on whole batches: groups are never cut.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxagent.data.batch import Batch, action_mask
from jaxagent.losses.base import select

CreditMetrics = Mapping[str, jax.Array]
CreditFn = Callable[[Batch, jax.Array], tuple[jax.Array, CreditMetrics]]


class Credit(NamedTuple):
    """A credit transform and the ``batch.scores`` it reads."""

    fn: CreditFn
    scores: frozenset[str] = frozenset()

    def __call__(self, batch: Batch, advantages: jax.Array) -> tuple[jax.Array, CreditMetrics]:
        return self.fn(batch, advantages)


def chain(*transforms: Credit | CreditFn) -> Credit:
    """Runs ``transforms`` in order; a plain function is a transform that reads no scores."""
    if not transforms:
        raise ValueError("chain needs at least one credit transform")
    steps = [t if isinstance(t, Credit) else Credit(t) for t in transforms]

    def fn(batch: Batch, advantages: jax.Array) -> tuple[jax.Array, CreditMetrics]:
        metrics: dict[str, jax.Array] = {}
        for step in steps:
            advantages, found = step(batch, advantages)
            metrics.update(found)
        return advantages, metrics

    return Credit(fn, frozenset().union(*(step.scores for step in steps)))


def clip(bound: float) -> Credit:
    """Clips advantages to [-bound, bound]."""
    if not bound > 0:
        raise ValueError(f"clip needs a bound above 0, got {bound}")

    def fn(batch: Batch, advantages: jax.Array) -> tuple[jax.Array, CreditMetrics]:
        mask = action_mask(batch)
        clipped = jnp.sum(mask & (jnp.abs(advantages) > bound))
        fraction = clipped / jnp.maximum(jnp.sum(mask), 1)
        return jnp.clip(advantages, -bound, bound), {"advantages/clipped_fraction": fraction}

    return Credit(fn)


def assign(credit: Credit | CreditFn, batch: Batch) -> tuple[Batch, dict[str, jax.Array]]:
    """The batch with its advantages filled, and metrics. Raises ValueError on missing scores.

    Advantages are 0 off the ACTION tokens of valid episodes, and carry no gradient.
    """
    credit = credit if isinstance(credit, Credit) else Credit(credit)
    missing = credit.scores - set(batch.scores)
    if missing:
        raise ValueError(f"credit needs the score {', '.join(sorted(missing))}: score the batch")
    mask = action_mask(batch)
    start = jnp.zeros_like(jnp.asarray(batch.advantages))
    advantages, found = credit(batch, start)
    advantages = jax.lax.stop_gradient(select(mask, advantages))
    count = jnp.maximum(jnp.sum(mask), 1)
    metrics = {
        **found,
        "advantages/mean": jnp.sum(advantages) / count,
        "advantages/abs_mean": jnp.sum(jnp.abs(advantages)) / count,
    }
    assigned: Batch = batch.replace(advantages=advantages)  # type: ignore[attr-defined]
    return assigned, metrics
