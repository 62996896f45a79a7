"""What a batch is given between packing and credit: further forward passes, and facts.

A pass declares which scores, extras and hidden states it provides, so that what an objective
or a credit pipeline needs is checked when the learner is built. Sequences of their own (a
teacher's, a gold answer's) are scored in blocks of one shape: whatever their number, nothing
is compiled anew. Passes only dispatch work to the device and never wait for it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from jaxagent.data.batch import Batch
from jaxagent.data.hindsight import Builder
from jaxagent.data.kinds import Kind
from jaxagent.data.packing import Placement
from jaxagent.data.scoring import (
    Scored,
    ScoreRows,
    boundary_sequences,
    empty_rows,
    pack_scored,
    teacher_sequences,
)
from jaxagent.episodes.episode import Episode
from jaxagent.losses.teachers import teacher_score
from jaxagent.models.config import ModelConfig
from jaxagent.models.logprobs import shift_logprobs
from jaxagent.models.sharding import BATCH_AXES, replicated
from jaxagent.models.transformer import Params, forward, unembedding_table
from jaxagent.training.state import TrainState
from jaxagent.training.step import make_scorer

Facts = Mapping[str, float]
NONE: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Setting:
    """What passes must fit to: the model, the largest batch, the sampler's temperature.

    ``tokens``: R * T of the largest batch; ``row_length`` T; ``episodes`` E; ``turns`` K.
    """

    model: ModelConfig
    tokens: int
    row_length: int
    episodes: int
    turns: int
    temperature: float
    mesh: Mesh | None


class Work(NamedTuple):
    """One batch on its way: its episodes in order, and where their contexts were packed."""

    state: TrainState
    episodes: Sequence[Episode]
    placement: Placement


# Adds what it provides to the batch; with it, facts for the metrics (host numbers).
PassFn = Callable[[Work, Batch], tuple[Batch, Facts]]


class Pass(NamedTuple):
    """``build(setting)`` gives the function; the rest says what it provides and compiles.

    ``unembeddings``: teacher name -> its own unembedding, where that is not the policy's.
    """

    build: Callable[[Setting], PassFn]
    scores: frozenset[str] = NONE
    extras: frozenset[str] = NONE
    hidden: frozenset[str] = NONE
    unembeddings: Mapping[str, jax.Array] | None = None


def own_tokens(name: str, params: Params | None = None, model: ModelConfig | None = None) -> Pass:
    """``scores[name]``: the batch's own tokens under other weights.

    ``own_tokens("reference", params)`` with frozen weights; without ``params`` those that the
    update starts from: ``own_tokens("proximal")``. ``own_tokens("teacher/big", params,
    model=config)`` is an external teacher, of another size perhaps, with the same vocabulary.
    """

    def build(setting: Setting) -> PassFn:
        _check_vocabulary(name, setting, model)
        score = make_scorer(
            model or setting.model, mesh=setting.mesh, temperature=setting.temperature
        )

        def fn(work: Work, batch: Batch) -> tuple[Batch, Facts]:
            weights = work.state.params if params is None else params
            return batch.with_score(name, score(weights, batch)), {}

        return fn

    return Pass(build, scores=frozenset({name}))


def teacher(
    name: str,
    advice: Builder,
    *,
    max_advice: int,
    params: Params | None = None,
    hidden: bool = False,
    tail: int = 0,
    rows: int = 8,
) -> Pass:
    """``scores["teacher/<name>"]`` and its mask: the same tokens, read with ``advice``.

    The teacher is the policy itself at the start of the update, or its moving average where
    the state keeps one, or ``params``. ``max_advice`` bounds the advice, in tokens: a row
    must hold it beside a whole context. ``hidden`` also keeps the hidden states, for
    :func:`jaxagent.losses.divergence`. ``tail``: see ``teacher_sequences``. ``rows``: of the
    blocks that are scored at a time.

    The mask is 1 on the ACTION tokens of the turns that are taught, and 0 where an episode
    has no advice. Facts: the share of ACTION tokens covered.
    """
    key = teacher_score(name)

    def build(setting: Setting) -> PassFn:
        run = _blocks(setting, rows, setting.row_length + max_advice, hidden)

        def fn(work: Work, batch: Batch) -> tuple[Batch, Facts]:
            told = advice(work.episodes)
            longest = max((len(a.tokens) for a in told), default=0)
            if longest > max_advice:
                raise ValueError(
                    f"teacher {name!r}: an advice of {longest} tokens exceeds "
                    f"max_advice={max_advice}; cut it in the builder or raise max_advice"
                )
            sequences = teacher_sequences(work.episodes, told, work.placement, tail)
            weights = _teacher_params(work.state) if params is None else params
            logprobs, states = run(weights, sequences)
            shape = np.shape(batch.tokens)
            mask = np.zeros(shape[0] * shape[1], np.float32)
            for sequence in sequences:
                mask[sequence.targets[sequence.targets >= 0]] = 1.0
            batch = batch.with_score(key, _cut(logprobs, shape))
            batch = batch.with_score(f"{key}/mask", mask.reshape(shape))
            if states is not None:
                batch = batch.with_hidden(name, _cut(states, shape))
            acted = int((np.asarray(batch.kind) == Kind.ACTION).sum())
            facts = {
                f"teachers/{name}/coverage": float(mask.sum()) / max(acted, 1),
                f"teachers/{name}/advised": float(len(told)),
            }
            return batch, facts

        return fn

    return Pass(
        build,
        scores=frozenset({key, f"{key}/mask"}),
        hidden=frozenset({name} if hidden else ()),
        unembeddings=None if params is None or not hidden else {name: unembedding_table(params)},
    )


def boundary_answer(
    name: str,
    answer: Callable[[Episode], Sequence[int] | None],
    *,
    max_answer: int,
    params: Params | None = None,
    closing: Sequence[int] = (),
    probability: bool = False,
    rows: int = 8,
) -> Pass:
    """``extras[name]`` [E,K+1]: the mean log-probability of an answer before and after turns.

    ``"gold_logprobs"`` with the gold answer's tokens (IGPO, TRACE), ``"evidence"`` with the
    episode's own final answer and ``probability=True``, which takes exp of the mean (SIOP).
    ``params``: whose opinion; by default the policy's at the start of the update. An episode
    without an answer (None) has 0 everywhere, so its gains are 0, and one longer than
    ``max_answer`` tokens counts as none; the facts say what share was answered. After its
    last turn an episode keeps its last value.
    """

    def build(setting: Setting) -> PassFn:
        length = setting.row_length + max_answer + len(closing)
        bins = setting.episodes * (setting.turns + 1)
        run = _blocks(setting, rows, length, hidden=False, bins=bins)
        shape = (setting.episodes, setting.turns + 1)

        @jax.jit
        def means(total: jax.Array, counts: jax.Array, last: jax.Array) -> jax.Array:
            mean = total / jnp.maximum(counts, 1)
            found = jnp.where(counts > 0, jnp.exp(mean) if probability else mean, 0.0)
            boundary = jnp.minimum(jnp.arange(shape[1])[None], last[:, None])
            return jnp.take_along_axis(found.reshape(shape), boundary, axis=1)

        def fn(work: Work, batch: Batch) -> tuple[Batch, Facts]:
            given = {
                index: list(tokens)
                for index, episode in enumerate(work.episodes)
                if episode.valid and (tokens := answer(episode)) and len(tokens) <= max_answer
            }
            sequences = boundary_sequences(work.episodes, given, setting.turns, closing)
            weights = work.state.params if params is None else params
            total, _ = run(weights, sequences)
            counts = np.zeros(bins, np.float32)
            for sequence in sequences:
                np.add.at(counts, sequence.targets[sequence.targets >= 0], 1.0)
            last = np.zeros(setting.episodes, np.int32)
            last[: len(work.episodes)] = [min(e.num_turns, setting.turns) for e in work.episodes]
            valid = sum(episode.valid for episode in work.episodes)
            facts = {f"answers/{name}/answered": len(given) / max(valid, 1)}
            return batch.with_extra(name, means(total, counts, last)), facts

        return fn

    return Pass(build, extras=frozenset({name}))


def fact(name: str, values: Callable[[Sequence[Episode], int, int], NDArray[np.generic]]) -> Pass:
    """``extras[name] = values(episodes, E, K)``, computed on the host.

    For ids and labels that the episodes themselves hold: states, windows, roles, outcomes,
    nodes of a tree. The array has E entries (more than there are episodes) on its first axis.
    """

    def build(setting: Setting) -> PassFn:
        def fn(work: Work, batch: Batch) -> tuple[Batch, Facts]:
            found = np.asarray(values(work.episodes, setting.episodes, setting.turns))
            return batch.with_extra(name, found), {}

        return fn

    return Pass(build, extras=frozenset({name}))


def derived(scores: Iterable[str], values: Callable[[Batch], Mapping[str, jax.Array]]) -> Pass:
    """Scores computed from those of earlier passes: ``values(batch)``, jitted, no gradient.

    ``derived(["returns"], lambda batch: {"returns": value_targets(batch)})``.
    """
    names = frozenset(scores)

    def build(setting: Setting) -> PassFn:
        compute = jax.jit(values)

        def fn(work: Work, batch: Batch) -> tuple[Batch, Facts]:
            found = compute(batch)
            if set(found) != names:
                raise ValueError(f"derived scores {sorted(found)} are not those declared: {names}")
            for key, value in found.items():
                batch = batch.with_score(key, value)
            return batch, {}

        return fn

    return Pass(build, scores=names)


def _teacher_params(state: TrainState) -> Params:
    return state.params if state.ema is None else state.ema


def _check_vocabulary(name: str, setting: Setting, model: ModelConfig | None) -> None:
    if model is not None and model.vocab_size != setting.model.vocab_size:
        raise ValueError(
            f"the model of score {name!r} has {model.vocab_size} tokens, the policy "
            f"{setting.model.vocab_size}: they must share a vocabulary"
        )


def _cut(flat: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[N, ...] of the largest batch to the rows [R,T, ...] of this one."""
    return flat[: shape[0] * shape[1]].reshape(*shape, *flat.shape[1:])


def _blocks(
    setting: Setting, rows: int, row_length: int, hidden: bool, bins: int | None = None
) -> Callable[[Params, Sequence[Scored]], tuple[jax.Array, jax.Array | None]]:
    """Scores sequences block by block: log-probabilities summed by target [N], hidden [N,D].

    N is ``bins`` or the tokens of the largest batch. With a mesh the rows of a block are
    spread over its data axes; the results are whole on every device.
    """
    config, mesh = setting.model, setting.mesh
    size = setting.tokens if bins is None else bins
    if mesh is not None:
        parts = int(np.prod([mesh.shape[axis] for axis in BATCH_AXES]))
        rows = -(-rows // parts) * parts

    @jax.jit
    def score(
        params: Params, block: ScoreRows, total: jax.Array, states: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        found, _ = forward(params, config, block.tokens, block.positions, block.segment_ids)
        wanted = block.targets >= 0
        logprobs = shift_logprobs(
            params,
            config,
            found,
            block.tokens,
            block.segment_ids,
            temperature=setting.temperature,
            mask=wanted,
        ).logprobs
        # Off the targets: an index beyond the end, which is dropped.
        at = jnp.where(wanted, block.targets, size).reshape(-1)
        total = total.at[at].add(logprobs.reshape(-1), mode="drop")
        if states is not None:
            before = jnp.pad(found[:, :-1], ((0, 0), (1, 0), (0, 0)))
            states = states.at[at].set(before.reshape(-1, before.shape[-1]), mode="drop")
        return total, states

    def run(params: Params, sequences: Sequence[Scored]) -> tuple[jax.Array, jax.Array | None]:
        total = jnp.zeros(size, jnp.float32)
        states = jnp.zeros((size, config.hidden_size), config.compute_dtype) if hidden else None
        blocks = list(pack_scored(sequences, rows=rows, row_length=row_length))
        # One block at the least, so that warming up on nothing compiles the program.
        for block in blocks or [empty_rows(rows, row_length)]:
            if mesh is not None:
                block = jax.device_put(block, NamedSharding(mesh, PartitionSpec(BATCH_AXES)))
                total, states = jax.device_put((total, states), replicated(mesh))
            total, states = score(params, block, total, states)
        return total, states

    return run
