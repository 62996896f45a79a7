"""Sampling on the device: one uniform a row, inverse CDF, no draw or sort over the vocabulary.

Convention of the recorded log-probability: ``log_softmax(logits / temperature)`` at the
drawn token, *before* top-k, top-p and min-p cut the distribution, which is what
``token_logprobs(..., temperature=...)`` gives the trainer. A greedy row (temperature 0)
records the log-probability at temperature 1.

Truncation follows the order of Hugging Face's ``generate``: temperature, top-k, then top-p
over what top-k left, then min-p relative to the likeliest token. Each is a threshold on the
probability, so ties at the threshold are all kept.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Bits of float32 1.0: non-negative floats order as their bits do, which lets a bisection
# over integers find an exact threshold.
_ONE_BITS = 0x3F800000
_BISECTIONS = 30
# The largest uniform below 1 that ``jax.random.uniform`` draws.
_BELOW_ONE = 1.0 - 2.0**-23


@dataclass(frozen=True)
class SamplingConfig:
    """How one ``generate`` call draws and when it stops.

    ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. Generation
    ends at ``max_new_tokens``, after a token of ``stop_tokens``, or after the token that
    completes one of ``stop_strings``.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(
                f"SamplingConfig.max_new_tokens must be at least 1, got {self.max_new_tokens}"
            )
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(
                "SamplingConfig.temperature must be finite and at least 0 (greedy), "
                f"got {self.temperature}"
            )
        if self.top_k < 0:
            raise ValueError(f"SamplingConfig.top_k must be at least 0 (off), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"SamplingConfig.top_p must lie in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"SamplingConfig.min_p must lie in [0, 1), got {self.min_p}")
        if any(token < 0 for token in self.stop_tokens):
            raise ValueError(
                f"SamplingConfig.stop_tokens must be token ids, got {self.stop_tokens}"
            )
        if any(not text for text in self.stop_strings):
            raise ValueError("SamplingConfig.stop_strings must not hold an empty string; remove it")


class RowSampling(NamedTuple):
    """Per-row settings as arrays ``[R]``, so that changing them compiles nothing."""

    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    top_k: jax.Array


def row_uniforms(key_data: jax.Array, positions: jax.Array) -> jax.Array:
    """Return one float32 uniform in [0, 1) for each ``positions [R, K]``.

    ``key_data [R, 2]`` uint32 holds each session's threefry key. The draw depends on the
    session's key and the token's position alone, not on the batch.
    """
    keys = jax.random.wrap_key_data(key_data, impl="threefry2x32")

    def draw(key: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(key, position), dtype=jnp.float32)

    return jax.vmap(jax.vmap(draw, (None, 0)))(keys, positions)


def sample(
    logits: jax.Array, uniforms: jax.Array, rows: RowSampling
) -> tuple[jax.Array, jax.Array]:
    """Draw one token a row from float32 ``logits [R, V]`` with ``uniforms [R]``.

    Returns tokens int32 ``[R]`` and log-probabilities float32 ``[R]`` under the convention
    of this module.
    """
    vocab = logits.shape[1]
    outer, inner = _fold(vocab)
    if outer * inner != vocab:
        padding = ((0, 0), (0, outer * inner - vocab))
        logits = jnp.pad(logits, padding, constant_values=-jnp.inf)
    # Token t sits at [t // inner, t % inner]. Sums run over the *outer* axis, which CPUs
    # vectorise; the CDF therefore walks the vocabulary column by column.
    grid = logits.reshape(logits.shape[0], outer, inner)
    greedy = rows.temperature == 0
    inverse = 1.0 / jnp.where(greedy, 1.0, rows.temperature)
    column_top = grid.max(1)
    top = column_top.max(1)
    exps = jnp.exp((grid - top[:, None, None]) * inverse[:, None, None])
    columns = exps.sum(1)
    total = columns.sum(1)

    truncated = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)
    threshold = jax.lax.cond(
        jnp.any(truncated & ~greedy),
        lambda: _threshold(exps, total, rows, outer * inner),
        lambda: jnp.zeros_like(top),
    )
    kept_columns = jax.lax.cond(
        jnp.any(threshold > 0),
        lambda: jnp.where(exps >= threshold[:, None, None], exps, 0.0).sum(1),
        lambda: columns,
    )
    column, residual = _invert(kept_columns, uniforms * jnp.cumsum(kept_columns, 1)[:, -1])
    column = jnp.where(greedy, jnp.argmax(column_top, axis=1), column)
    members = jnp.take_along_axis(grid, column[:, None, None], axis=2)[:, :, 0]
    # Taken, not computed again: another exp might round to the other side of the threshold.
    weights = jnp.take_along_axis(exps, column[:, None, None], axis=2)[:, :, 0]
    weights = jnp.where(weights >= threshold[:, None], weights, 0.0)
    row, _ = _invert(weights, residual)
    row = jnp.where(greedy, jnp.argmax(members, axis=1), row)
    chosen = jnp.take_along_axis(members, row[:, None], axis=1)[:, 0]
    logprobs = (chosen - top) * inverse - jnp.log(total)
    return (row * inner + column).astype(jnp.int32), logprobs


def _fold(vocab: int) -> tuple[int, int]:
    """Return (outer, inner) with outer * inner >= vocab, near-square, exact if possible."""
    root = math.isqrt(vocab)
    for inner in range(max(root, 1), min(4 * root, vocab) + 1):
        if vocab % inner == 0:
            return vocab // inner, inner
    inner = root + 1
    return -(-vocab // inner), inner


def _invert(weights: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the first index whose running sum exceeds ``target [R]``, and what is left.

    ``weights [R, N]``. Never an index of weight zero, whatever the rounding of the sums.
    """
    sums = jnp.cumsum(weights, axis=1)
    target = jnp.minimum(target, sums[:, -1] * _BELOW_ONE)
    beyond = (sums > target[:, None]) & (weights > 0)
    last = weights.shape[1] - 1 - jnp.argmax((weights > 0)[:, ::-1], axis=1)
    index = jnp.where(beyond.any(1), jnp.argmax(beyond, axis=1), last)
    before = jnp.take_along_axis(sums - weights, index[:, None], axis=1)[:, 0]
    return index, jnp.maximum(target - before, 0.0)


def _threshold(exps: jax.Array, total: jax.Array, rows: RowSampling, vocab: int) -> jax.Array:
    """Return per row the smallest of ``exps [R, outer, inner]`` that truncation keeps."""
    top_k = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)

    def enough(threshold: jax.Array) -> jax.Array:
        return (exps >= threshold[:, None, None]).sum(1, dtype=jnp.int32).sum(1) >= top_k

    kth = jnp.where(rows.top_k > 0, _largest(enough, top_k.shape), 0.0)

    def mass(threshold: jax.Array) -> jax.Array:
        return jnp.where(exps >= threshold[:, None, None], exps, 0.0).sum(1).sum(1)

    goal = rows.top_p * jnp.where(rows.top_k > 0, mass(kth), total)
    nucleus = _largest(lambda threshold: mass(threshold) >= goal, top_k.shape)
    nucleus = jnp.where(rows.top_p < 1, nucleus, 0.0)
    # exps are relative to the likeliest token, so min-p is a threshold as it stands.
    return jnp.maximum(jnp.maximum(kth, nucleus), rows.min_p)


def _largest(holds: Callable[[jax.Array], jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """Return per row the largest float32 in [0, 1] at which ``holds`` (true at 0, monotone)."""

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low + 1) // 2
        ok = holds(jax.lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle - 1)

    bounds = (jnp.zeros(shape, jnp.int32), jnp.full(shape, _ONE_BITS, jnp.int32))
    low, _ = jax.lax.fori_loop(0, _BISECTIONS, halve, bounds)
    return jax.lax.bitcast_convert_type(low, jnp.float32)
