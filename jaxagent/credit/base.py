"""Credit assignment: pure functions ``(batch, advantages) -> (advantages, metrics)``.

``advantages`` is [R,T]. A base method (``group_relative`` ...) ignores what it is given
and starts afresh; the others shift, scale or bound it. All work inside jit as well as on
NumPy batches, on whole batches: groups are never cut.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxagent.data.batch import Batch, action_mask
from jaxagent.losses.base import select

CreditMetrics = Mapping[str, jax.Array]
CreditFn = Callable[[Batch, jax.Array], tuple[jax.Array, CreditMetrics]]
Stage = Literal["base", "multiplicative", "additive", "any"]


class Credit(NamedTuple):
    """A credit transform, the ``batch.scores`` and ``batch.extras`` it reads, and its place.

    ``stage``: ``"base"`` starts afresh; ``"multiplicative"`` moves credit between the tokens
    of an episode and keeps its sign and sum, so it must see the base's advantages before
    anything was added to them; ``"additive"`` shifts them; ``"any"`` goes anywhere.
    ``steps``: what :func:`chain` put together.
    """

    fn: CreditFn
    scores: frozenset[str] = frozenset()
    extras: frozenset[str] = frozenset()
    stage: Stage = "any"
    steps: "tuple[Credit, ...]" = ()

    def __call__(self, batch: Batch, advantages: jax.Array) -> tuple[jax.Array, CreditMetrics]:
        return self.fn(batch, advantages)


def chain(*transforms: Credit | CreditFn) -> Credit:
    """Runs ``transforms`` in order: a base, then multiplicative ones, then additive ones.

    A plain function is a transform that reads no scores and may stand anywhere, at the start
    too. A chain within a chain counts as written out. Raises ValueError on a wrong order.
    """
    if not transforms:
        raise ValueError("chain needs at least one credit transform")
    given = [t if isinstance(t, Credit) else Credit(t) for t in transforms]
    steps = tuple(step for credit in given for step in (credit.steps or (credit,)))
    _check_order(steps)

    def fn(batch: Batch, advantages: jax.Array) -> tuple[jax.Array, CreditMetrics]:
        metrics: dict[str, jax.Array] = {}
        for step in steps:
            advantages, found = _checked(_name(step), step(batch, advantages), batch)
            metrics.update(found)
        return advantages, metrics

    return Credit(
        fn,
        frozenset().union(*(step.scores for step in steps)),
        frozenset().union(*(step.extras for step in steps)),
        "base" if any(step.stage == "base" for step in steps) else "any",
        steps,
    )


def _checked(name: str, result: Any, batch: Batch) -> tuple[jax.Array, CreditMetrics]:
    """What a transform returned. Raises TypeError or ValueError unless it is advantages [R,T]."""
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        raise TypeError(
            f"{name} returned {type(result).__name__}: a credit transform returns "
            "(advantages, metrics), with {} for no metrics"
        )
    if jnp.shape(result[0]) != jnp.shape(batch.tokens):
        raise ValueError(
            f"{name} returned advantages of shape {jnp.shape(result[0])}: they are one number a "
            f"token, {jnp.shape(batch.tokens)} here (data.batch.per_token spreads [E] numbers)"
        )
    return result


def _check_order(steps: Sequence[Credit]) -> None:
    for index, step in enumerate(steps):
        before = steps[:index]
        name = _name(step)
        if step.stage == "base":
            lost = [_name(other) for other in before if other.stage != "any"]
            if lost:
                raise ValueError(
                    f"{name} starts afresh and would discard {', '.join(lost)}: "
                    "a chain has one base, and it comes first"
                )
        elif step.stage != "any" and not before:
            raise ValueError(
                f"{name} is {step.stage}: it changes advantages that are there; put a base "
                "before it, such as group_relative()"
            )
        elif step.stage == "multiplicative":
            added = [_name(other) for other in before if other.stage == "additive"]
            if added:
                raise ValueError(
                    f"{name} is multiplicative: it must come right after the base, "
                    f"before the additive {', '.join(added)}"
                )


def _name(step: Credit) -> str:
    """The factory that made it, as an error message should call it."""
    return getattr(step.fn, "__qualname__", repr(step.fn)).split(".<locals>")[0]


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
    """The batch with its advantages filled, and metrics.

    Advantages are 0 off the ACTION tokens of valid episodes, and carry no gradient. Raises
    ValueError on missing scores and extras, and where ``credit`` lacks its base.
    """
    credit = chain(credit)
    missing = credit.scores - set(batch.scores)
    if missing:
        raise ValueError(f"credit needs the score {', '.join(sorted(missing))}: score the batch")
    missing = credit.extras - set(batch.extras)
    if missing:
        raise ValueError(
            f"credit needs the extra {', '.join(sorted(missing))}: add it with batch.with_extra"
        )
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
