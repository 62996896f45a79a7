"""Heads in an update: as outputs of its forward pass, and as scores before it.

PPO with a critic, for example::

    configs = {"values": HeadConfig()}
    params = add_heads(params, key, model, configs)
    targets = derived(["returns"], lambda batch: {"returns": value_targets(batch)})
    passes = [head_pass(configs, ["values"]), targets]
    objective = combine(policy=(1.0, policy), value=(0.5, value_loss()))
    update = make_update(model, objective, optimizer, outputs=head_outputs(configs))

with ``credit.gae()`` for the advantages.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxagent.credit.turns import turn_span
from jaxagent.data.batch import Batch, action_mask
from jaxagent.data.kinds import Kind
from jaxagent.losses.base import MAX_LOG_RATIO
from jaxagent.models.config import ModelConfig
from jaxagent.models.heads import (
    HeadConfig,
    from_token_before,
    head_of,
    head_scalars,
    prompt_scalars,
)
from jaxagent.models.transformer import Params, forward
from jaxagent.training.passes import Facts, Pass, PassFn, Setting, Work
from jaxagent.training.step import OutputFn, place_batch

T = TypeVar("T")


def head_outputs(configs: Mapping[str, HeadConfig]) -> dict[str, OutputFn]:
    """What ``make_update(outputs=...)`` takes: each head gives the output of its name, [r,T].

    With pooling ``"token"``, 0 at the first token of a segment; with ``"prompt"``, one
    number on all tokens of a segment. 0 on padding.
    """
    return {name: _output(name, config) for name, config in configs.items()}


def make_reader(
    model_config: ModelConfig, configs: Mapping[str, HeadConfig], *, mesh: Mesh | None = None
) -> Callable[[Params, Batch], tuple[dict[str, jax.Array], dict[str, jax.Array]]]:
    """``read(params, batch) -> (at tokens, at ends)``: what the heads say, without gradient.

    At tokens, ``{name: [R,T]}`` as :func:`head_outputs` gives it. At ends, for heads that
    read tokens, ``{name: [E]}``: read from the last token of each episode (nothing follows it
    that would be predicted), 0 where an episode has no turn. One forward pass, compiled once
    a batch shape. A monitor reads episodes under way with it, packed as they stand.
    """
    outputs = head_outputs(configs)

    def read(params: Params, batch: Batch) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        hidden, _ = forward(params, model_config, batch.tokens, batch.positions, batch.segment_ids)
        ends = {
            name: _at_end(batch, head_scalars(head_of(params, name), hidden))
            for name, config in configs.items()
            if config.pooling == "token"
        }
        return {name: fn(params, hidden, batch) for name, fn in outputs.items()}, ends

    return _on_bare_batches(read, mesh)


def head_pass(configs: Mapping[str, HeadConfig], names: Sequence[str]) -> Pass:
    """``scores[name]`` [R,T] of the heads ``names``, under the weights the update starts from.

    ``"values"`` are V_old of the value loss, and what :func:`jaxagent.credit.gae` reads. Of
    heads that read tokens also ``extras["last_<name>"]`` [E], read from the last token of
    each episode: ``gae(bootstrap=True)`` needs ``"last_values"``.
    """
    absent = sorted(set(names) - set(configs))
    if absent or not names:
        raise ValueError(
            f"head_pass needs names of heads in configs ({', '.join(sorted(configs))}), got "
            f"{', '.join(absent) or 'none'}"
        )
    chosen = {name: configs[name] for name in names}

    def build(setting: Setting) -> PassFn:
        read = make_reader(setting.model, chosen, mesh=setting.mesh)

        def fn(work: Work, batch: Batch) -> tuple[Batch, Facts]:
            found, ends = read(work.state.params, batch)
            for name, values in found.items():
                batch = batch.with_score(name, values)
            for name, values in ends.items():
                batch = batch.with_extra(f"last_{name}", values)
            return batch, {}

        return fn

    ends = {f"last_{name}" for name, config in chosen.items() if config.pooling == "token"}
    return Pass(build, scores=frozenset(chosen), extras=frozenset(ends))


def meter_pass(name: str = "progress", params: Params | None = None) -> Pass:
    """``extras["meter"]`` [E,K+1]: tokens to go before turn 0 and after each turn (DeltaTTG).

    ``name`` is a head trained with :func:`jaxagent.losses.progress_regression`, that is to
    say log(1 + the ACTION tokens after a token), read from the state before it. ``params``
    are the frozen weights of the meter and of the policy it reads (the same model); without
    them, those that the update starts from.

    Between two turns it is read at the last token of the earlier one, or of the rewritten
    history in its place: the state that the next turn's first ACTION token is predicted
    from, where the head was trained. That token is still to go as well, hence ``1 + expm1``.
    After its last turn a completed episode has 0 to go, which needs no prediction, and a
    truncated one what is read at its last token. There each episode stays up to K. A turn
    without an ACTION token has what the next one begins with; invalid episodes are 0.
    """
    configs = {name: HeadConfig()}

    def build(setting: Setting) -> PassFn:
        outputs = head_outputs(configs)

        def meter(weights: Params, batch: Batch) -> jax.Array:
            hidden, _ = forward(
                weights, setting.model, batch.tokens, batch.positions, batch.segment_ids
            )
            to_go = _tokens_to_go(outputs[name](weights, hidden, batch))
            at_end = _at_end(batch, _tokens_to_go(head_scalars(head_of(weights, name), hidden)))
            return _at_boundaries(batch, to_go, jnp.where(batch.truncated, at_end, 0.0))

        read = _on_bare_batches(meter, setting.mesh)

        def fn(work: Work, batch: Batch) -> tuple[Batch, Facts]:
            weights = work.state.params if params is None else params
            return batch.with_extra("meter", read(weights, batch)), {}

        return fn

    return Pass(build, extras=frozenset({"meter"}))


def _output(name: str, config: HeadConfig) -> OutputFn:
    def fn(params: Params, hidden: jax.Array, rows: Batch) -> jax.Array:
        head = head_of(params, name)
        segments = jnp.asarray(rows.segment_ids)
        if config.detach:
            hidden = jax.lax.stop_gradient(hidden)
        if config.pooling == "prompt":
            prompt = jnp.asarray(rows.kind) == Kind.PROMPT
            return prompt_scalars(head, hidden, segments, prompt)
        return from_token_before(head_scalars(head, hidden), segments)

    return fn


def _on_bare_batches(
    fn: Callable[[Params, Batch], T], mesh: Mesh | None
) -> Callable[[Params, Batch], T]:
    """``fn`` jitted, for batches whose scores, which only make for more shapes, are left out."""
    jitted = jax.jit(fn)

    def run(params: Params, batch: Batch) -> T:
        bare: Batch = batch.replace(scores={}, extras={}, hidden={})  # type: ignore[attr-defined]
        return jitted(params, bare if mesh is None else place_batch(bare, mesh))

    return run


def _tokens_to_go(predicted: jax.Array) -> jax.Array:
    # An untrained head must not overflow: the differences would be NaN.
    return 1.0 + jnp.expm1(jnp.clip(predicted, 0.0, MAX_LOG_RATIO))


def _at_end(batch: Batch, values: jax.Array) -> jax.Array:
    """[E]: ``values`` [R,T] at the last token of the last turn of each episode, else 0."""
    _, last = turn_span(batch, jnp.asarray(batch.segment_ids) > 0)
    turns = jnp.where(last >= 0, jnp.arange(batch.num_turns), -1)
    turn = jnp.max(turns, axis=1, initial=-1, keepdims=True)
    place = jnp.take_along_axis(last, jnp.maximum(turn, 0), axis=1)[:, 0]
    found = values.reshape(-1)[jnp.maximum(place, 0)]
    return jnp.where((turn[:, 0] >= 0) & jnp.asarray(batch.valid), found, 0.0)


def _at_boundaries(batch: Batch, values: jax.Array, ends: jax.Array) -> jax.Array:
    """[E,K+1]: ``values`` [R,T] at the first ACTION token of each turn, then ``ends`` [E]."""
    first, last = turn_span(batch, action_mask(batch))
    found = values.reshape(-1)[jnp.minimum(first, values.size - 1)]
    found = jnp.concatenate([found, ends[:, None]], axis=1)
    turns = jnp.where(last >= 0, jnp.arange(batch.num_turns), batch.num_turns)
    turns = jnp.pad(turns, ((0, 0), (0, 1)), constant_values=batch.num_turns)
    # The next turn that exists, from each boundary on.
    following = jax.lax.cummin(turns, axis=1, reverse=True)
    return jnp.take_along_axis(found, following, axis=1)
