"""Log-probabilities of given tokens without a ``[tokens, vocab]`` array.

Logits are made for one chunk of tokens at a time, forward and backward. Divergences between
the policy's whole distribution and a teacher's come out of the same loop: both are made
from hidden states, chunk by chunk.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxagent.models.config import ModelConfig
from jaxagent.models.transformer import Params, forward

# Logits of a chunk, in numbers: memory does not grow with the vocabulary. Fewer tokens than
# the least would make for products too small to be fast.
_CHUNK_LOGITS = 1 << 25
_LEAST_CHUNK = 256
DivergenceKind = Literal["forward_kl", "reverse_kl", "jsd"]


class TokenLogprobs(NamedTuple):
    """``logprobs [B, T]`` float32 and, where asked for, ``entropy [B, T]`` float32.

    ``divergences``: one ``[B, T]`` float32 for each teacher, in their order.
    """

    logprobs: jax.Array
    entropy: jax.Array | None
    divergences: tuple[jax.Array, ...] = ()


class Teacher(NamedTuple):
    """The other side of a divergence; nothing of it gets a gradient.

    ``hidden [B, T, D']`` at t predicts target t, ``weight`` is the teacher's unembedding,
    ``[V, D']`` (``[D', V]`` when the config's embeddings are untied). ``kind``:
    ``"forward_kl"`` is KL(teacher || policy), ``"reverse_kl"`` KL(policy || teacher), ``"jsd"``
    the Jensen-Shannon divergence with weights of one half.
    """

    kind: DivergenceKind
    hidden: jax.Array
    weight: jax.Array


def token_logprobs(
    params: Params,
    config: ModelConfig,
    hidden: jax.Array,
    targets: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    entropy: bool = False,
    mask: jax.Array | None = None,
    teachers: Sequence[Teacher] = (),
    chunk: int | None = None,
) -> TokenLogprobs:
    """Return log-softmax(logits / temperature) at ``targets``, its entropy and divergences.

    ``hidden [B, T, D]`` at t predicts ``targets [B, T]`` at t. Where a target is negative or
    ``mask [B, T]`` is False all results are 0 and no gradient flows. Gradients reach
    ``hidden`` and the unembedding (the embedding if tied), not the temperature. The
    temperature holds for ``teachers`` too. ``chunk`` is about how many tokens' logits exist
    at a time, by default as many as 128 MB hold (at least 256); chunks run along T, so rows
    may be sharded over devices.
    """
    if hidden.shape[:2] != targets.shape:
        raise ValueError(
            f"targets must have the shape {hidden.shape[:2]} of hidden's rows, got {targets.shape}"
        )
    if chunk is None:
        chunk = max(_LEAST_CHUNK, _CHUNK_LOGITS // config.vocab_size)
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}")
    if isinstance(temperature, int | float) and not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}; sample greedily apart")
    keep = targets >= 0
    if mask is not None:
        keep = keep & mask
    targets = jnp.where(keep, targets, -1)
    weight = params["embed"] if config.tie_embeddings else params["unembed"]
    inverse = 1.0 / jnp.asarray(temperature, jnp.float32)
    width = max(1, min(chunk // max(hidden.shape[0], 1), hidden.shape[1]))
    plan = _Plan(config.tie_embeddings, entropy, tuple(t.kind for t in teachers), width)
    told = jax.lax.stop_gradient(tuple((t.hidden, t.weight) for t in teachers))
    logprobs, entropies, divergences = _chunked(plan, hidden, weight, targets, inverse, told)
    return TokenLogprobs(logprobs, entropies if entropy else None, divergences)


def shifted_logprobs(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    entropy: bool = False,
    mask: jax.Array | None = None,
    chunk: int | None = None,
) -> TokenLogprobs:
    """Return at index t the log-probability of ``tokens[t]`` given what precedes it.

    All inputs are ``[B, T]``. The first token of a segment, padding, and tokens where
    ``mask`` is False get 0 (entropy likewise) and no gradient.
    """
    hidden, _ = forward(params, config, tokens, positions, segment_ids)
    return shift_logprobs(
        params,
        config,
        hidden,
        tokens,
        segment_ids,
        temperature=temperature,
        entropy=entropy,
        mask=mask,
        chunk=chunk,
    )


def shift_logprobs(
    params: Params,
    config: ModelConfig,
    hidden: jax.Array,
    tokens: jax.Array,
    segment_ids: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    entropy: bool = False,
    mask: jax.Array | None = None,
    teachers: Sequence[Teacher] = (),
    chunk: int | None = None,
) -> TokenLogprobs:
    """As ``shifted_logprobs``, from hidden states ``[B, T, D]`` that exist already.

    A teacher's hidden state at t is here the one that predicts token t: its own are shifted
    by whoever aligned them.
    """
    follows = predicted(segment_ids)
    if mask is not None:
        follows = follows & mask
    # Targets move left by one, rather than hidden states right: they are the smaller array.
    targets = _shift_left(jnp.where(follows, tokens, -1), -1)
    result = token_logprobs(
        params,
        config,
        hidden,
        targets,
        temperature=temperature,
        entropy=entropy,
        teachers=[t._replace(hidden=_shift_left(t.hidden, 0)) for t in teachers],
        chunk=chunk,
    )
    return jax.tree.map(_shift_right, result)


def predicted(segment_ids: jax.Array) -> jax.Array:
    """Return ``[B, T]`` bool: the token is not padding and has a predecessor in its segment."""
    same = segment_ids[:, 1:] == segment_ids[:, :-1]
    return jnp.pad(same, ((0, 0), (1, 0))) & (segment_ids > 0)


def _shift_left(x: jax.Array, fill: int) -> jax.Array:
    widths = ((0, 0), (0, 1), *((0, 0),) * (x.ndim - 2))
    return jnp.pad(x[:, 1:], widths, constant_values=fill)


def _shift_right(x: jax.Array) -> jax.Array:
    return jnp.pad(x[:, :-1], ((0, 0), (1, 0)))


class _Plan(NamedTuple):
    """What is static: how the unembedding lies, what is asked for, tokens of a row a chunk."""

    tied: bool
    entropy: bool
    kinds: tuple[DivergenceKind, ...]
    width: int


# Hidden states and unembedding of each teacher.
_Told = tuple[tuple[jax.Array, jax.Array], ...]
_Result = tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(
    plan: _Plan,
    hidden: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    inverse: jax.Array,
    told: _Told,
) -> _Result:
    return _chunked_forward(plan, hidden, weight, targets, inverse, told)[0]


def _logits(tied: bool, hidden: jax.Array, weight: jax.Array, inverse: jax.Array) -> jax.Array:
    """Return float32 logits ``[n, V]`` of ``hidden [n, D]`` at the temperature."""
    contract = (((1,), (1 if tied else 0,)), ((), ()))
    logits = jax.lax.dot_general(hidden, weight, contract, preferred_element_type=jnp.float32)
    return logits * inverse


def _chunk_forward(
    logits: jax.Array, targets: jax.Array, entropy: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return log-probability, entropy and log-normaliser, each ``[n]``."""
    top = jnp.max(logits, axis=-1)
    exps = jnp.exp(logits - top[:, None])
    total = jnp.sum(exps, axis=-1)
    log_total = top + jnp.log(total)
    chosen = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], axis=-1)[:, 0]
    keep = targets >= 0
    logprobs = jnp.where(keep, chosen - log_total, 0.0)
    if not entropy:
        return logprobs, jnp.zeros_like(logprobs), log_total
    mean = jnp.sum(exps * logits, axis=-1) / total
    return logprobs, jnp.where(keep, log_total - mean, 0.0), log_total


def _divergence(kind: DivergenceKind, policy: jax.Array, teacher: jax.Array) -> jax.Array:
    """Return ``[n]`` from log-probabilities ``[n, V]``."""
    if kind == "forward_kl":
        return jnp.sum(jnp.exp(teacher) * (teacher - policy), axis=-1)
    if kind == "reverse_kl":
        return jnp.sum(jnp.exp(policy) * (policy - teacher), axis=-1)
    middle = jnp.logaddexp(policy, teacher) - jnp.log(2.0)
    apart = jnp.exp(policy) * (policy - middle) + jnp.exp(teacher) * (teacher - middle)
    return 0.5 * jnp.sum(apart, axis=-1)


def _divergence_gradient(kind: DivergenceKind, policy: jax.Array, teacher: jax.Array) -> jax.Array:
    """Return the gradient ``[n, V]`` of the divergence with respect to the policy's logits."""
    probs = jnp.exp(policy)
    if kind == "forward_kl":
        return probs - jnp.exp(teacher)
    if kind == "reverse_kl":
        slope = policy - teacher
    else:
        slope = 0.5 * (policy - (jnp.logaddexp(policy, teacher) - jnp.log(2.0)))
    return probs * (slope - jnp.sum(probs * slope, axis=-1, keepdims=True))


def _split(x: jax.Array, width: int) -> jax.Array:
    """Cut ``[B, T, ...]`` into ``[chunks, B * width, ...]``, T padded to a multiple of it."""
    batch, length = x.shape[:2]
    x = x.reshape(batch, length // width, width, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0).reshape(length // width, batch * width, *x.shape[3:])


def _join(x: jax.Array, batch: int) -> jax.Array:
    chunks, rows = x.shape[:2]
    x = x.reshape(chunks, batch, rows // batch, *x.shape[2:])
    return jnp.moveaxis(x, 0, 1).reshape(batch, chunks * (rows // batch), *x.shape[3:])


def _pad(x: jax.Array, width: int, fill: int = 0) -> jax.Array:
    extra = -x.shape[1] % width
    widths = ((0, 0), (0, extra), *((0, 0),) * (x.ndim - 2))
    return jnp.pad(x, widths, constant_values=fill) if extra else x


def _chunked_forward(
    plan: _Plan,
    hidden: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    inverse: jax.Array,
    told: _Told,
) -> tuple[_Result, Any]:
    batch, length = targets.shape
    weight_in = weight.astype(hidden.dtype)
    teachers = [w.astype(h.dtype) for h, w in told]

    def step(_: None, inputs: Any) -> tuple[None, Any]:
        h, y, others = inputs
        logits = _logits(plan.tied, h, weight_in, inverse)
        logprobs, entropies, norm = _chunk_forward(logits, y, plan.entropy)
        divergences, norms = [], [norm]
        for kind, other, w in zip(plan.kinds, others, teachers, strict=True):
            theirs = _logits(plan.tied, other, w, inverse)
            norms.append(jax.nn.logsumexp(theirs, axis=-1))
            apart = _divergence(kind, logits - norm[:, None], theirs - norms[-1][:, None])
            divergences.append(jnp.where(y >= 0, apart, 0.0))
        return None, (logprobs, entropies, tuple(divergences), tuple(norms))

    inputs = (
        _split(_pad(hidden, plan.width), plan.width),
        _split(_pad(targets, plan.width, -1), plan.width),
        tuple(_split(_pad(h, plan.width), plan.width) for h, _ in told),
    )
    _, outputs = jax.lax.scan(step, None, inputs)
    logprobs, entropies, divergences, norms = jax.tree.map(
        lambda x: _join(x, batch)[:, :length], outputs
    )
    residuals = (hidden, weight, targets, inverse, told, entropies, norms)
    return (logprobs, entropies, divergences), residuals


def _chunked_backward(
    plan: _Plan, residuals: Any, gradients: _Result
) -> tuple[jax.Array, jax.Array, None, jax.Array, _Told]:
    hidden, weight, targets, inverse, told, entropies, norms = residuals
    batch, length = targets.shape
    weight_in = weight.astype(hidden.dtype)
    teachers = [w.astype(h.dtype) for h, w in told]
    keep = targets >= 0
    gradients = jax.tree.map(lambda g: jnp.where(keep, g, 0.0), gradients)

    def step(total: jax.Array, inputs: Any) -> tuple[jax.Array, jax.Array]:
        h, y, others, (norm, *norms), ent, (g_lp, g_ent, g_div) = inputs
        logp = _logits(plan.tied, h, weight_in, inverse) - norm[:, None]
        probs = jnp.exp(logp)
        scale = -g_lp[:, None]
        if plan.entropy:
            # d entropy / d logit_v = -p_v (log p_v + entropy)
            scale = scale - g_ent[:, None] * (logp + ent[:, None])
        hit = y[:, None] == jnp.arange(logp.shape[1])
        d_logits = jnp.where(hit, g_lp[:, None], 0.0) + probs * scale
        for kind, other, w, their_norm, g in zip(
            plan.kinds, others, teachers, norms, g_div, strict=True
        ):
            theirs = _logits(plan.tied, other, w, inverse) - their_norm[:, None]
            d_logits = d_logits + g[:, None] * _divergence_gradient(kind, logp, theirs)
        d_logits = (d_logits * inverse).astype(h.dtype)
        d_hidden = d_logits @ (weight_in if plan.tied else weight_in.T)
        d_weight = d_logits.T @ h if plan.tied else h.T @ d_logits
        return total + d_weight.astype(jnp.float32), d_hidden

    cut = partial(jax.tree.map, lambda x: _split(_pad(x, plan.width), plan.width))
    inputs = (
        cut(hidden),
        _split(_pad(targets, plan.width, -1), plan.width),
        cut(tuple(h for h, _ in told)),
        cut(norms),
        cut(entropies),
        cut(gradients),
    )
    d_weight, d_hidden = jax.lax.scan(step, jnp.zeros_like(weight), inputs)
    return (
        _join(d_hidden, batch)[:, :length].astype(hidden.dtype),
        d_weight.astype(weight.dtype),
        None,
        jnp.zeros_like(inverse),
        jax.tree.map(jnp.zeros_like, told),
    )


_chunked.defvjp(_chunked_forward, _chunked_backward)
