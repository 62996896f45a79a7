"""Losses as plain functions over one batch, and how they add up to an objective.

A loss never sees the model. It gets ``outputs``, what the one forward pass yielded
(``outputs["logprobs"]`` [R,T], ...), and the whole batch of the update, also when the
forward pass itself is cut into micro-batches or spread over devices. So its numerator and
denominator are always those of the global batch, and it may sum over episodes and groups.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxagent.data.batch import Batch, episode_sum, per_token

Outputs = Mapping[str, jax.Array]
# A metric is a scalar, or a (numerator, denominator) pair.
Metrics = Mapping[str, Any]
LossFn = Callable[[Outputs, Batch], tuple[jax.Array, jax.Array, Metrics]]
Weight = float | Callable[[jax.Array], jax.Array]
Aggregate = Literal["token", "episode", "episode_sum", "constant"]

AGGREGATES = ("token", "episode", "episode_sum", "constant")
MAX_LOG_RATIO = 20.0
# Not an output of the model: the version of the weights that the update starts from.
STEP = "step"

# (outputs, batch) -> (losses [R,T], mask [R,T], metrics), losses 0 off the mask.
TokenLossFn = Callable[[Outputs, Batch], tuple[jax.Array, jax.Array, Metrics]]


class TokenLoss(NamedTuple):
    """A loss before it is summed up, for what works token by token (corrections).

    ``reduce(losses, mask, batch) -> (numerator, denominator)`` sums it up.
    ``old``: whose probabilities its ratio is taken against, None where it has no ratio.
    ``weighted``: each token already carries a weight that turns the sampler's
    distribution into another policy's; a second one would square it.
    """

    fn: TokenLossFn
    reduce: Callable[[jax.Array, jax.Array, Batch], tuple[jax.Array, jax.Array]]
    old: str | None
    weighted: bool


class Loss(NamedTuple):
    """A loss and what it must be given.

    ``needs``: outputs of the forward pass (``"logprobs"``, ``"entropy"``, ...); ``"step"``
    is the version of the weights that the update starts from, and always given.
    ``scores``: names that must be in ``batch.scores``.
    ``fn(outputs, batch) -> (numerator, denominator, metrics)``: the term's value is
    numerator / denominator, and 0 where the denominator is 0.
    ``token_local``: the gradient with respect to the outputs of one row does not depend on
    the outputs of another row (true of any sum over tokens, false of losses that square
    or exponentiate a sum over an episode). It spares micro-batched updates one forward
    pass; False is always right.
    ``tokens``: the same loss token by token, where it is a sum over tokens.
    """

    needs: frozenset[str]
    scores: frozenset[str]
    fn: LossFn
    token_local: bool = False
    tokens: TokenLoss | None = None


@dataclass(frozen=True)
class Term:
    name: str
    weight: Weight
    loss: Loss


@dataclass(frozen=True)
class Objective:
    """A weighted sum of losses over one forward pass; build it with :func:`combine`."""

    terms: tuple[Term, ...]

    @property
    def needs(self) -> frozenset[str]:
        return frozenset().union(*(term.loss.needs for term in self.terms)) - {STEP}

    @property
    def scores(self) -> frozenset[str]:
        return frozenset().union(*(term.loss.scores for term in self.terms))

    @property
    def token_local(self) -> bool:
        return all(term.loss.token_local for term in self.terms)

    def require(self, *, outputs: frozenset[str], scores: frozenset[str] | None = None) -> None:
        """Raises ValueError naming the term whose input will be missing."""
        for term in self.terms:
            for kind, needed, given in (
                ("output", term.loss.needs - {STEP}, outputs),
                ("score", term.loss.scores, scores),
            ):
                if given is not None and not needed <= given:
                    missing = ", ".join(sorted(needed - given))
                    raise ValueError(
                        f"term {term.name!r} needs the {kind} {missing!s}, which this update is "
                        f"not given (it has: {', '.join(sorted(given)) or 'none'})"
                    )

    def __call__(
        self, outputs: Outputs, batch: Batch, step: jax.Array | int = 0
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss and its metrics, both of the whole batch.

        Metrics are named ``<term>/<metric>``; ``<term>/loss`` is the term before its weight.
        """
        total = jnp.zeros((), jnp.float32)
        metrics: dict[str, jax.Array] = {}
        for term in self.terms:
            given = {**outputs, STEP: jnp.asarray(step)} if STEP in term.loss.needs else outputs
            numerator, denominator, found = _checked(term.name, term.loss.fn(given, batch))
            value = ratio(numerator, denominator)
            metrics[f"{term.name}/loss"] = value
            for name, metric in found.items():
                metrics[f"{term.name}/{name}"] = (
                    ratio(*metric) if isinstance(metric, tuple) else jnp.asarray(metric)
                )
            weight = term.weight
            if callable(weight):
                total = total + weight(jnp.asarray(step)) * value
            elif weight != 0.0:  # a weight of 0 only logs: not even a NaN gets through
                total = total + weight * value
        metrics["loss"] = total
        return total, jax.lax.stop_gradient(metrics)


def _checked(name: str, result: Any) -> tuple[jax.Array, jax.Array, Metrics]:
    """What a loss returned. Raises TypeError or ValueError unless it is what it must be."""
    wanted = "a loss returns (numerator, denominator, metrics)"
    if not isinstance(result, tuple) or len(result) != 3:
        got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        raise TypeError(f"term {name!r} returned {got}: {wanted}, with {{}} for no metrics")
    numerator, denominator, metrics = result
    for part, value in (("numerator", numerator), ("denominator", denominator)):
        if jnp.shape(value) != ():
            raise ValueError(
                f"term {name!r} returned a {part} of shape {jnp.shape(value)}: it must be a "
                "scalar; sum it up, or use losses.base.aggregate_tokens"
            )
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"term {name!r} returned metrics of type {type(metrics).__name__}: {wanted}"
        )
    for key, metric in metrics.items():
        for value in metric if isinstance(metric, tuple) else (metric,):
            if jnp.shape(value) != ():
                raise ValueError(
                    f"term {name!r} returned the metric {key!r} of shape {jnp.shape(value)}: a "
                    "metric is a scalar or a pair (numerator, denominator) of scalars"
                )
    return numerator, denominator, metrics


def combine(**terms: tuple[Weight, Loss | LossFn]) -> Objective:
    """``combine(policy=(1.0, loss), world=(0.05, other))``: one objective, one forward pass.

    A weight is a number or a schedule ``step -> weight``. A plain function
    ``(outputs, batch) -> (numerator, denominator, metrics)`` is a loss that needs
    ``outputs["logprobs"]`` and no scores. Raises TypeError or ValueError on anything else.
    """
    if not terms:
        raise ValueError("combine needs at least one term, e.g. policy=(1.0, loss)")
    found = []
    for name, term in terms.items():
        if not isinstance(term, tuple) or isinstance(term, Loss) or len(term) != 2:
            raise TypeError(f"term {name!r} must be a pair (weight, loss), got {term!r}")
        weight, loss = term
        if not callable(weight) and not (isinstance(weight, int | float) and weight == weight):
            raise TypeError(f"the weight of term {name!r} must be a number or a schedule")
        if not isinstance(loss, Loss):
            if not callable(loss):
                raise TypeError(f"term {name!r} must hold a Loss or a function, got {loss!r}")
            loss = Loss(frozenset({"logprobs"}), frozenset(), loss)
        found.append(Term(name, weight if callable(weight) else float(weight), loss))
    return Objective(tuple(found))


def ratio(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """numerator / denominator; 0 (value and gradient) where the denominator is not positive."""
    denominator = jnp.asarray(denominator)
    some = denominator > 0
    return jnp.where(some, numerator, 0.0) / jnp.where(some, denominator, 1)


def select(mask: jax.Array, values: jax.Array) -> jax.Array:
    """``values`` where ``mask``, else 0. Before any exp or log, so that what a masked
    position holds (-inf too) reaches neither the value nor the gradient."""
    return jnp.where(mask, values, 0.0)


def clamp_log_ratio(values: jax.Array) -> jax.Array:
    """Clamps to +-20, where exp still is finite and its gradient is stopped."""
    return jnp.clip(values, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def check_aggregate(
    aggregate: str, constant: float | None = None, episode_mean: bool | None = None
) -> None:
    """Raises ValueError unless the three make sense together (see :func:`aggregate_tokens`)."""
    if aggregate not in AGGREGATES:
        raise ValueError(f"aggregate must be one of {', '.join(AGGREGATES)}; got {aggregate!r}")
    if aggregate == "constant":
        if constant is None or not constant > 0:
            raise ValueError("aggregate='constant' needs constant=... above 0 (a length)")
        if episode_mean is None:
            raise ValueError(
                "aggregate='constant' needs episode_mean=True (divide by the number of episodes "
                "too, as Dr. GRPO does) or episode_mean=False"
            )
    elif constant is not None or episode_mean is not None:
        raise ValueError(
            f"constant and episode_mean only go with aggregate='constant', not {aggregate!r}"
        )


def aggregate_tokens(
    values: jax.Array,
    mask: jax.Array,
    batch: Batch,
    aggregate: Aggregate = "token",
    constant: float | None = None,
    episode_mean: bool | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(numerator, denominator) of ``values`` [R,T] over ``mask`` [R,T].

    - ``"token"``: sum over all tokens / their number (DAPO; verl's token-mean);
    - ``"episode"``: mean over episodes of the episode's token mean (GRPO);
    - ``"episode_sum"``: mean over episodes of the episode's token sum;
    - ``"constant"``: sum over all tokens / ``constant``, and with ``episode_mean`` also
      divided by the number of episodes (Dr. GRPO).

    Episodes with no token in the mask count in no denominator.
    """
    values = select(mask, values)
    total = jnp.sum(values)
    if aggregate == "token":
        return total, jnp.sum(mask)
    counts = episode_sum(batch, mask.astype(values.dtype))
    episodes = jnp.sum(counts > 0)
    if aggregate == "episode":
        return jnp.sum(values / per_token(batch, jnp.maximum(counts, 1)).clip(1)), episodes
    if aggregate == "episode_sum":
        return total, episodes
    assert constant is not None
    if episode_mean:
        return total / constant, episodes
    return total, jnp.asarray(constant, values.dtype)


def token_loss(
    fn: TokenLossFn,
    aggregate: Aggregate = "token",
    constant: float | None = None,
    episode_mean: bool | None = None,
    *,
    needs: frozenset[str] = frozenset({"logprobs"}),
    scores: frozenset[str] = frozenset(),
    old: str | None = None,
    token_local: bool = True,
) -> Loss:
    """The loss that sums up ``fn`` as :func:`aggregate_tokens` does, and exposes ``fn`` itself.

    ``old``: see :class:`TokenLoss`. A ratio to the sampler ("behavior") is a weight too.
    """
    check_aggregate(aggregate, constant, episode_mean)

    def reduce(losses: jax.Array, mask: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        return aggregate_tokens(losses, mask, batch, aggregate, constant, episode_mean)

    def total(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        losses, mask, metrics = fn(outputs, batch)
        return (*reduce(losses, mask, batch), metrics)

    return Loss(needs, scores, total, token_local, TokenLoss(fn, reduce, old, old == "behavior"))
