"""The key/value cache of the rollout engine.

One pair of arrays a layer, so that a compiled function updates each in place. Keys lie
transposed: a decode step multiplies one query by many keys, and that product runs along
contiguous memory when position is the last axis.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxagent.models.config import ModelConfig


class Cache(NamedTuple):
    """Keys (after RoPE) ``[slots, kv_heads, head_dim, len]``, values ``[slots, kv_heads, len,
    head_dim]``: a tuple with one array a layer for each, in the compute dtype.

    Entry ``position`` of a slot belongs to the token at that position of its sequence. What
    lies beyond a sequence's length is never read.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]

    @property
    def slots(self) -> int:
        """Number of sequences."""
        return self.v[0].shape[0]

    @property
    def length(self) -> int:
        """Positions a slot has room for."""
        return self.v[0].shape[2]


def init_cache(config: ModelConfig, slots: int, length: int) -> Cache:
    """Return an empty cache."""
    dtype = jnp.dtype(config.compute_dtype)
    heads, dim, layers = config.num_kv_heads, config.head_dim, range(config.num_layers)
    return Cache(
        tuple(jnp.zeros((slots, heads, dim, length), dtype) for _ in layers),
        tuple(jnp.zeros((slots, heads, length, dim), dtype) for _ in layers),
    )


def resize(cache: Cache, length: int) -> Cache:
    """Return the cache with room for ``length`` positions, padded or cut at the end."""
    if length <= cache.length:
        return Cache(
            tuple(k[..., :length] for k in cache.k), tuple(v[:, :, :length] for v in cache.v)
        )
    more = length - cache.length
    return Cache(
        tuple(jnp.pad(k, ((0, 0), (0, 0), (0, 0), (0, more))) for k in cache.k),
        tuple(jnp.pad(v, ((0, 0), (0, 0), (0, more), (0, 0))) for v in cache.v),
    )


def write_rows(
    cache: Cache,
    new: Cache,
    slots: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
) -> Cache:
    """Write ``counts[r]`` positions of row r of ``new`` into ``slots[r]`` from ``starts[r]`` on.

    ``new`` has ``R`` rows of ``W <= len`` positions. A count of 0 leaves its slot untouched.
    Rows are written one after the other, each as one window update in place; a scatter
    would move single positions.
    """
    width = new.length

    def write(row: int | jax.Array, cache: Cache) -> Cache:
        # A window that would overhang the end starts earlier and keeps what it covers there.
        start = jnp.minimum(starts[row], cache.length - width)
        source = jnp.arange(width) - (starts[row] - start)
        keep = (source >= 0) & (source < counts[row])
        source = jnp.clip(source, 0, width - 1)

        def update(cached: jax.Array, fresh: jax.Array, axis: int) -> jax.Array:
            corner: list[int | jax.Array] = [slots[row], 0, 0, 0]
            corner[axis] = start
            shape = (1, *fresh.shape[1:])
            window = jax.lax.dynamic_slice(cached, corner, shape)
            fresh = jax.lax.dynamic_index_in_dim(fresh, row, keepdims=True)
            fresh = jnp.take(fresh, source, axis=axis)
            mask = jnp.expand_dims(keep, tuple(i for i in range(4) if i != axis))
            return jax.lax.dynamic_update_slice(cached, jnp.where(mask, fresh, window), corner)

        return Cache(
            tuple(update(c, n, 3) for c, n in zip(cache.k, new.k, strict=True)),
            tuple(update(c, n, 2) for c, n in zip(cache.v, new.v, strict=True)),
        )

    return jax.lax.fori_loop(0, slots.shape[0], write, cache)


def copy_slots(cache: Cache, sources: jax.Array, targets: jax.Array, count: jax.Array) -> Cache:
    """Copy whole slots ``sources[i] -> targets[i]`` for the first ``count`` pairs, in order."""

    def copy(i: int | jax.Array, cache: Cache) -> Cache:
        def move(x: jax.Array) -> jax.Array:
            row = jax.lax.dynamic_index_in_dim(x, sources[i], keepdims=True)
            return jax.lax.dynamic_update_slice_in_dim(x, row, targets[i], axis=0)

        return Cache(tuple(move(k) for k in cache.k), tuple(move(v) for v in cache.v))

    return jax.lax.fori_loop(0, count, copy, cache)
