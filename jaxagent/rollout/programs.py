"""The engine's compiled functions; all shapes are static, all settings are arrays.

They are jitted here, once a process, so engines with equal configurations share what has
been compiled. ``mesh`` is where weights and cache lie, split over its ``tensor`` axis.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from jaxagent.models import decoding, sharding
from jaxagent.models.cache import Cache, copy_slots, init_cache, resize, write_rows
from jaxagent.models.config import ModelConfig
from jaxagent.models.decoding import Packed
from jaxagent.models.layers import Params
from jaxagent.rollout.sampling import RowSampling, row_uniforms, sample

NO_TOKEN = -1


class Rows(NamedTuple):
    """What a decode block needs to know of each slot, as two arrays: one transfer each.

    ``ints [slots, 6 + stop tokens]`` int32: last token (in no cache yet), tokens cached,
    tokens it may still draw (0: the slot sits this block out), two words of the session's
    key, top-k, stop tokens (``NO_TOKEN``: none). ``floats [slots, 3]``: temperature, top-p,
    min-p.
    """

    ints: NDArray[np.int32]
    floats: NDArray[np.float32]

    @classmethod
    def idle(cls, slots: int, stop_tokens: int) -> "Rows":
        """Return rows that all sit out."""
        ints = np.zeros((slots, 6 + stop_tokens), np.int32)
        ints[:, 6:] = NO_TOKEN
        floats = np.tile(np.array([1.0, 1.0, 0.0], np.float32), (slots, 1))
        return cls(ints, floats)


class Drawn(NamedTuple):
    """``tokens`` and ``logprobs`` ``[steps, slots]``; ``counts [slots]`` says how many hold."""

    tokens: jax.Array
    logprobs: jax.Array
    counts: jax.Array


@partial(jax.jit, static_argnames=("config", "mesh", "steps"), donate_argnames=("cache",))
def decode_block(
    packed: Packed, cache: Cache, rows: Rows, *, config: ModelConfig, mesh: Mesh, steps: int
) -> tuple[Cache, Drawn]:
    """Draw up to ``steps`` tokens in every slot that takes part.

    A slot stops at a stop token or its limit, and the block when no slot is left.
    """
    ints, floats = jnp.asarray(rows.ints), jnp.asarray(rows.floats)
    slots = ints.shape[0]
    token, starts, remaining, top_k = (ints[:, i] for i in (0, 1, 2, 5))
    key_data = jax.lax.bitcast_convert_type(ints[:, 3:5], jnp.uint32)
    stops = ints[:, 6:]
    settings = RowSampling(floats[:, 0], floats[:, 1], floats[:, 2], top_k)
    # The token fed at position p draws the one at p + 1.
    positions = starts[:, None] + 1 + jnp.arange(steps)
    uniforms = row_uniforms(key_data, positions).T

    class Carry(NamedTuple):
        step: jax.Array
        block: Cache
        token: jax.Array
        remaining: jax.Array
        drawn: Drawn

    def unfinished(carry: Carry) -> jax.Array:
        return (carry.step < steps) & jnp.any(carry.remaining > 0)

    def advance(carry: Carry) -> Carry:
        step, active = carry.step, carry.remaining > 0
        hidden, block = decoding.decode_step(
            packed, config, cache, carry.block, step, carry.token, starts
        )
        token, logprob = sample(decoding.logits(packed, hidden), uniforms[step], settings)
        stopped = (token[:, None] == stops).any(1)
        remaining = jnp.where(active & ~stopped, carry.remaining - 1, 0)
        drawn = Drawn(
            jax.lax.dynamic_update_index_in_dim(carry.drawn.tokens, token, step, 0),
            jax.lax.dynamic_update_index_in_dim(carry.drawn.logprobs, logprob, step, 0),
            carry.drawn.counts + active,
        )
        return Carry(step + 1, block, token, remaining, drawn)

    blank = Drawn(
        jnp.zeros((steps, slots), jnp.int32),
        jnp.zeros((steps, slots), jnp.float32),
        jnp.zeros(slots, jnp.int32),
    )
    block = _split(init_cache(config, slots, steps), mesh)
    first = Carry(jnp.int32(0), block, token, remaining, blank)
    last = jax.lax.while_loop(unfinished, advance, first)
    cache = write_rows(cache, last.block, jnp.arange(slots), starts, last.drawn.counts)
    return _split(cache, mesh), last.drawn


@partial(jax.jit, static_argnames=("config", "mesh"), donate_argnames=("cache",))
def prefill(
    packed: Packed,
    cache: Cache,
    tokens: NDArray[np.int32],
    rows: NDArray[np.int32],
    *,
    config: ModelConfig,
    mesh: Mesh,
) -> Cache:
    """Append ``tokens [R, T]`` to slots; ``rows [R, 3]`` holds slot, tokens cached, count."""
    slots, starts, counts = (jnp.asarray(rows)[:, i] for i in range(3))
    _, cache = decoding.extend(packed, config, cache, jnp.asarray(tokens), slots, starts, counts)
    return _split(cache, mesh)


@partial(jax.jit, static_argnames=("mesh",), donate_argnames=("cache",))
def copy(cache: Cache, pairs: NDArray[np.int32], count: NDArray[np.int32], *, mesh: Mesh) -> Cache:
    """Copy slots: ``pairs [slots, 2]`` of (source, target), of which ``count`` hold."""
    sources, targets = (jnp.asarray(pairs)[:, i] for i in range(2))
    return _split(copy_slots(cache, sources, targets, jnp.asarray(count)), mesh)


@partial(jax.jit, static_argnames=("mesh", "length"))
def resized(cache: Cache, *, mesh: Mesh, length: int) -> Cache:
    """Return the cache with room for ``length`` positions a slot."""
    return _split(resize(cache, length), mesh)


@partial(jax.jit, static_argnames=("config", "mesh"))
def pack(params: Params, *, config: ModelConfig, mesh: Mesh) -> Packed:
    """Lay out parameters for sampling, in buffers of their own.

    The copy matters: jit returns an unchanged argument as it is, and a trainer that later
    donates its parameters would delete them under the engine.
    """
    packed = jax.tree.map(jnp.copy, decoding.pack(params, config, fuse=mesh.size == 1))
    return jax.lax.with_sharding_constraint(packed, sharding.packed_shardings(packed, mesh))


@partial(jax.jit, static_argnames=("config", "mesh", "slots", "length"))
def empty_cache(*, config: ModelConfig, mesh: Mesh, slots: int, length: int) -> Cache:
    """Return a cache of nothing."""
    return _split(init_cache(config, slots, length), mesh)


def _split(cache: Cache, mesh: Mesh) -> Cache:
    """Keep keys and values split by head: what comes out lies as what went in."""
    return jax.lax.with_sharding_constraint(cache, sharding.cache_sharding(mesh))
