"""Small networks that read one number from the policy's hidden states.

Their parameters are ``params["heads"][name]`` of the policy they read, so that one optimiser,
one checkpoint and one gradient serve both; the decoder and the sampler know nothing of them.
All heads are one network: ``layers - 1`` times (linear, GELU, LayerNorm), then a linear map
to a number, which is 0 at the start.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from jaxagent.models.config import ModelConfig
from jaxagent.models.logprobs import predicted
from jaxagent.models.transformer import Params

Pooling = Literal["token", "prompt"]

_NORM_EPS = 1e-5


@dataclass(frozen=True)
class HeadConfig:
    """One head.

    Attributes:
      layers: linear maps, the last one to a number included; 1 is a linear head.
      width: of what lies between them; by default the model's hidden size.
      pooling: ``"token"`` reads every token from the state before it, as its log-probability
        is; ``"prompt"`` reads the mean state of the leading prompt, one number a segment.
      detach: whether the head's gradient stops short of the policy's own parameters.
    """

    layers: int = 1
    width: int | None = None
    pooling: Pooling = "token"
    detach: bool = False

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(f"HeadConfig.layers must be at least 1, got {self.layers}")
        if self.width is not None and self.width < 1:
            raise ValueError(f"HeadConfig.width must be positive (or None), got {self.width}")
        if self.width is not None and self.layers == 1:
            raise ValueError("HeadConfig.width needs layers of at least 2: a linear head has none")
        if self.pooling not in ("token", "prompt"):
            raise ValueError(
                f"HeadConfig.pooling must be 'token' or 'prompt', got {self.pooling!r}"
            )


# log Z of FlowRL (Zhu et al. 2025, ``ProjZModule``), without its dropout of 0.1: an update is
# a function of its batch. Theirs is not zero at the start.
LOG_Z_HEAD = HeadConfig(layers=3, pooling="prompt")


def init_heads(
    key: jax.Array, model_config: ModelConfig, configs: Mapping[str, HeadConfig]
) -> Params:
    """Draw ``{name: parameters}``, float32; each head depends on the key and its name alone.

    Linear maps have deviation 1 / sqrt(inputs) and biases 0; the last one is all 0, so every
    head says 0 at first.
    """
    return {
        name: _init_head(jax.random.fold_in(key, zlib.crc32(name.encode())), model_config, config)
        for name, config in configs.items()
    }


def add_heads(
    params: Params, key: jax.Array, model_config: ModelConfig, configs: Mapping[str, HeadConfig]
) -> Params:
    """Return ``params`` with fresh heads beside those it has.

    Raises ValueError naming the heads that exist already.
    """
    present = params.get("heads", {})
    twice = sorted(set(present) & set(configs))
    if twice:
        raise ValueError(f"params have heads named {', '.join(twice)} already: rename the new ones")
    return {**params, "heads": {**present, **init_heads(key, model_config, configs)}}


def head_of(params: Params, name: str) -> Params:
    """Return the parameters of a head; ValueError where there is none of that name."""
    heads = params.get("heads", {})
    if name not in heads:
        raise ValueError(
            f"params have no head {name!r} (they have: {', '.join(sorted(heads)) or 'none'}); "
            "add it with jaxagent.models.heads.add_heads"
        )
    found: Params = heads[name]
    return found


def head_scalars(head: Params, hidden: jax.Array) -> jax.Array:
    """Return the number that each state holds: ``[..., D]`` to ``[...]``, float32 at the least.

    Matrix products run in the dtype of ``hidden``, sums and norms in float32.
    """
    x = hidden
    for index in range((len(head) - 1) // 2):
        x = jax.nn.gelu(_linear(head[f"linear_{index}"], x), approximate=False)
        x = _layer_norm(head[f"norm_{index}"], x).astype(hidden.dtype)
    return _linear(head["out"], x)[..., 0]


def from_token_before(values: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Return ``[B, T]`` with, at each token, the value of the one before it in its segment.

    The first token of a segment, and padding, get 0.
    """
    before = jnp.pad(values[:, :-1], ((0, 0), (1, 0)))
    return jnp.where(predicted(segment_ids), before, 0.0)


def prompt_scalars(
    head: Params, hidden: jax.Array, segment_ids: jax.Array, prompt: jax.Array
) -> jax.Array:
    """Return ``[B, T]``: what the head reads from the mean state of each segment's prompt.

    ``prompt [B, T]`` bool; averaged are the ``prompt`` tokens that a segment (which is
    contiguous in its row) starts with. All of its tokens get the same number; without a
    prompt, and on padding, it is 0.
    """
    length = segment_ids.shape[1]
    columns = jnp.arange(length)
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    segment = jnp.cumsum(starts, axis=1)  # from 0, whatever the ids are
    real = segment_ids > 0
    # Leading: no other token since the segment began.
    begin = jax.lax.cummax(jnp.where(starts, columns, 0), axis=1)
    other = jax.lax.cummax(jnp.where(prompt & real, -1, columns), axis=1)
    leading = real & (other < begin)

    def means(states: jax.Array, ids: jax.Array, leads: jax.Array) -> tuple[jax.Array, jax.Array]:
        dtype = jnp.promote_types(jnp.float32, states.dtype)
        total = jax.ops.segment_sum(
            jnp.where(leads[:, None], states, 0).astype(dtype), ids, num_segments=length
        )
        count = jax.ops.segment_sum(leads.astype(dtype), ids, num_segments=length)
        return total / jnp.maximum(count, 1)[:, None], count

    # Row by row, so that rows which lie on several devices stay there.
    pooled, count = jax.vmap(means)(hidden, segment, leading)
    found = jnp.where(count > 0, head_scalars(head, pooled.astype(hidden.dtype)), 0.0)
    return jnp.where(real, jnp.take_along_axis(found, segment, axis=1), 0.0)


def _init_head(key: jax.Array, model_config: ModelConfig, config: HeadConfig) -> Params:
    inner = config.layers - 1
    size = model_config.hidden_size
    width = config.width or size
    head: Params = {}
    for index, k in enumerate(jax.random.split(key, inner) if inner else ()):
        fan_in = width if index else size
        weight = fan_in**-0.5 * jax.random.normal(k, (fan_in, width), jnp.float32)
        bias = jnp.zeros(width, jnp.float32)
        head[f"linear_{index}"] = {"weight": weight, "bias": bias}
        head[f"norm_{index}"] = {"scale": jnp.ones(width, jnp.float32), "bias": bias}
    last = width if inner else size
    head["out"] = {"weight": jnp.zeros((last, 1), jnp.float32), "bias": jnp.zeros(1, jnp.float32)}
    return head


def _linear(linear: Params, x: jax.Array) -> jax.Array:
    dtype = jnp.promote_types(jnp.float32, x.dtype)
    weight = linear["weight"].astype(x.dtype)
    return jnp.dot(x, weight, preferred_element_type=dtype) + linear["bias"].astype(dtype)


def _layer_norm(norm: Params, x: jax.Array) -> jax.Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centred**2, axis=-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt(variance + _NORM_EPS)
    return scaled * norm["scale"].astype(x.dtype) + norm["bias"].astype(x.dtype)
