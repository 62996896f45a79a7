"""The decoder over a cache: several tokens at once (``extend``) or one a row (``decode_step``).

Both run ``layers.decoder_layer``, as training does; only where keys and values come from
differs. Layers are unrolled rather than scanned, so that each one's weights and cache are
read where they lie instead of being sliced out of a stack at every step.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxagent.models.attention import rope_tables
from jaxagent.models.cache import Cache, write_rows
from jaxagent.models.config import ModelConfig
from jaxagent.models.layers import Params, decoder_layer, rms_norm

# Finite, so that a padding query that sees no key yields a mean rather than NaN.
_MASKED = -1e30


class Packed(NamedTuple):
    """Parameters laid out for sampling, in the compute dtype.

    ``layers`` holds a dict a layer, ``qkv`` and ``gate_up`` fused or not; ``unembed`` is ``[D, V]``
    also where embeddings are tied.
    """

    embed: jax.Array
    unembed: jax.Array
    final_norm: jax.Array
    layers: tuple[Params, ...]


def pack(params: Params, config: ModelConfig, fuse: bool = True) -> Packed:
    """Lay out parameters for ``extend`` and ``decode_step``; done once for new weights.

    ``fuse`` joins the projections that read the same input; not for weights split by head,
    since a cut of the joined columns would not fall between heads.
    """
    dtype = jnp.dtype(config.compute_dtype)
    stacked = dict(params["layers"])
    if fuse:
        stacked["qkv"] = jnp.concatenate([stacked.pop(name) for name in ("q", "k", "v")], -1)
        stacked["gate_up"] = jnp.concatenate([stacked.pop(name) for name in ("gate", "up")], -1)
        if config.qkv_bias:
            biases = [stacked.pop(f"{name}_bias") for name in ("q", "k", "v")]
            stacked["qkv_bias"] = jnp.concatenate(biases, -1)
    # Norm scales multiply in float32 whatever the compute dtype, so they stay as they are.
    stacked = {k: x if k.endswith("norm") else x.astype(dtype) for k, x in stacked.items()}
    unembed = params["embed"].T if config.tie_embeddings else params["unembed"]
    return Packed(
        params["embed"].astype(dtype),
        unembed.astype(dtype),
        params["final_norm"],
        tuple(jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(config.num_layers)),
    )


def logits(packed: Packed, hidden: jax.Array) -> jax.Array:
    """Return float32 logits ``[..., V]`` of hidden states ``[..., D]``."""
    contract = (((hidden.ndim - 1,), (0,)), ((), ()))
    return jax.lax.dot_general(hidden, packed.unembed, contract, preferred_element_type=jnp.float32)


def extend(
    packed: Packed,
    config: ModelConfig,
    cache: Cache,
    tokens: jax.Array,
    slots: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Append ``counts[r]`` of ``tokens [R, T]`` to slot ``slots[r]``, which holds ``starts[r]``.

    Returns the hidden states after the final norm ``[R, T, D]`` (of no meaning beyond a
    row's count) and the cache. A row with count 0 changes nothing; the other slots must
    differ from one another. ``T`` is at most the cache's length.
    """
    length = tokens.shape[1]
    x = packed.embed[tokens]
    rope = rope_tables(config, starts[:, None] + jnp.arange(length))
    earlier = jnp.arange(cache.length) < starts[:, None]
    causal = jnp.tril(jnp.ones((length, length), bool))
    resumed = jnp.any((starts > 0) & (counts > 0))
    keys, values = [], []
    for index, weights in enumerate(packed.layers):

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, index: int = index
        ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            k, v = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
            q = _by_kv_head(q, config)
            fresh = _scores(q, k, causal[None])

            def with_cache() -> jax.Array:
                held = _scores(q, cache.k[index][slots], earlier[:, None])
                return _mix((held, fresh), (cache.v[index][slots], v))

            # A batch of fresh prompts, the common case, never touches the cache.
            mixed = jax.lax.cond(resumed, with_cache, lambda: _mix((fresh,), (v,)))
            return _by_position(mixed), (k, v)

        x, (k, v) = decoder_layer(weights, config, x, rope, attend)
        keys.append(k)
        values.append(v)
    cache = write_rows(cache, Cache(tuple(keys), tuple(values)), slots, starts, counts)
    return rms_norm(x, packed.final_norm, config.norm_eps), cache


def decode_step(
    packed: Packed,
    config: ModelConfig,
    cache: Cache,
    block: Cache,
    step: jax.Array,
    tokens: jax.Array,
    starts: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Feed ``tokens [slots]``, one a slot, at position ``starts + step``.

    ``starts [slots]`` is what the cache held when the block began. The cache is only read:
    keys and values of the block's own tokens go to ``block``, a small cache of as many
    positions as the block has steps, at ``step``. Returns the hidden states after the final
    norm ``[slots, D]`` and the new block.
    """
    x = packed.embed[tokens][:, None]
    rope = rope_tables(config, (starts + step)[:, None])
    held = (jnp.arange(cache.length) < starts[:, None])[:, None]
    recent = (jnp.arange(block.length) <= step)[None, None]
    keys, values = [], []
    for index, weights in enumerate(packed.layers):

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, index: int = index
        ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            k, v = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
            k = jax.lax.dynamic_update_slice_in_dim(block.k[index], k, step, axis=3)
            v = jax.lax.dynamic_update_slice_in_dim(block.v[index], v, step, axis=2)
            q = _by_kv_head(q, config)
            scores = (_scores(q, cache.k[index], held), _scores(q, k, recent))
            return _by_position(_mix(scores, (cache.v[index], v))), (k, v)

        x, (k, v) = decoder_layer(weights, config, x, rope, attend)
        keys.append(k)
        values.append(v)
    hidden = rms_norm(x[:, 0], packed.final_norm, config.norm_eps)
    return hidden, Cache(tuple(keys), tuple(values))


def _by_kv_head(q: jax.Array, config: ModelConfig) -> jax.Array:
    """``[B, T, heads, dim]`` -> ``[B, kv_heads, group, T, dim]``, scaled."""
    batch, length, _, dim = q.shape
    q = (q * jnp.asarray(dim**-0.5, q.dtype)).reshape(batch, length, config.num_kv_heads, -1, dim)
    return q.transpose(0, 2, 3, 1, 4)


def _by_position(mixed: jax.Array) -> jax.Array:
    """``[B, kv_heads, group, T, dim]`` -> ``[B, T, heads, dim]``."""
    batch, kv_heads, group, length, dim = mixed.shape
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * group, dim)


def _scores(q: jax.Array, k: jax.Array, mask: jax.Array) -> jax.Array:
    """Return float32 scores ``[B, kv_heads, group, T, S]``; ``k [B, kv_heads, dim, S]``, mask
    ``[B, T, S]`` broadcastable."""
    batch, heads, group, length, dim = q.shape
    flat = q.reshape(batch, heads, group * length, dim)
    scores = jnp.einsum("bhqd,bhds->bhqs", flat, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, heads, group, length, k.shape[-1])
    return jnp.where(mask[:, None, None], scores, _MASKED)


def _mix(scores: tuple[jax.Array, ...], values: tuple[jax.Array, ...]) -> jax.Array:
    """Softmax over the scores of all parts together; mix ``values [B, kv_heads, S, dim]``."""
    top = scores[0].max(-1, keepdims=True)
    for part in scores[1:]:
        top = jnp.maximum(top, part.max(-1, keepdims=True))
    exps = [jnp.exp(part - top) for part in scores]
    total: Any = sum(part.sum(-1, keepdims=True) for part in exps)
    out: Any = 0.0
    for part, v in zip(exps, values, strict=True):
        batch, heads, group, length, _ = part.shape
        weights = (part / total).astype(v.dtype).reshape(batch, heads, group * length, -1)
        mixed = jnp.einsum("bhqs,bhsd->bhqd", weights, v)
        out = out + mixed.reshape(batch, heads, group, length, -1)
    return out
