"""The key/value cache of the rollout engine."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxagent.models.config import ModelConfig


class Cache(NamedTuple):
    """Keys (after RoPE) and values, each ``[layers, slots, kv_heads, max_len, head_dim]``.

    Entry ``[:, slot, :, position]`` belongs to the token at ``position`` of the slot's
    sequence. What lies at positions not yet written is never read: a query attends only
    to positions up to its own.
    """

    k: jax.Array
    v: jax.Array


def init_cache(config: ModelConfig, slots: int, max_len: int) -> Cache:
    """Return an empty cache in the compute dtype."""
    shape = (config.num_layers, slots, config.num_kv_heads, max_len, config.head_dim)
    dtype = jnp.dtype(config.compute_dtype)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def write(
    cached: jax.Array, new: jax.Array, positions: jax.Array, segment_ids: jax.Array
) -> jax.Array:
    """Write one layer's ``new [B, T, kv_heads, head_dim]`` at ``positions [B, T]``.

    ``cached`` is ``[B, kv_heads, max_len, head_dim]``. Padding (segment id 0) and positions
    beyond ``max_len`` are dropped.
    """
    slots, max_len = cached.shape[0], cached.shape[2]
    where = jnp.where(segment_ids > 0, positions, max_len)
    rows = jnp.arange(slots)[:, None]
    return cached.at[rows, :, where].set(new, mode="drop")
