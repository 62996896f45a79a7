"""The jitted update: one forward pass, any objective, any cut of the batch.

However a batch is cut into micro-batches or spread over devices, the objective is
evaluated on the outputs of the *whole* batch, so denominators, episode sums and group
statistics are global by construction and the gradient is the same to rounding. Only the
model's forward and backward passes run in pieces:

- token-local objectives: each piece's forward pass is followed at once by its backward
  pass; the cotangent of its outputs comes from the objective of the whole batch with the
  other rows' outputs left at 0, which by definition do not matter;
- others: all forward passes first, then the objective's cotangent, then each piece again
  with its backward pass (Gao et al. 2021, "GradCache"): one more forward pass, exact.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxagent.compilations import compilations
from jaxagent.data.batch import Batch, action_mask, observation_mask, per_token
from jaxagent.losses.base import Objective, Outputs, ratio, select
from jaxagent.models.config import ModelConfig
from jaxagent.models.logprobs import DivergenceKind, Teacher, shift_logprobs
from jaxagent.models.sharding import BATCH_AXES, replicated
from jaxagent.models.transformer import Params, forward, unembedding_table
from jaxagent.training.state import TrainState, state_shardings

# (params, hidden [r,T,D], rows) -> [r,T]; ``rows`` is the batch with some of its rows.
OutputFn = Callable[[Params, jax.Array, Batch], jax.Array]

MODEL_OUTPUTS = frozenset({"logprobs", "entropy"})
_ROW_FIELDS = (
    "tokens",
    "positions",
    "segment_ids",
    "episode_ids",
    "kind",
    "turn_ids",
    "behavior_logprobs",
    "policy_versions",
    "advantages",
    "scores",
    "hidden",
)


@dataclass
class Update:
    """``update(state, batch) -> (state, metrics)``; the state passed in is donated.

    ``unembeddings``: teacher name -> its unembedding, for divergences from an external
    teacher; else it is that of the state's moving average, or of the policy where there is
    none. ``metrics`` are float32 scalars on the device: fetch them when they are logged, not at
    each step. ``state.step`` is the version of the weights that the update starts from. Where a
    gradient is not finite, weights and optimiser stay as they are (``optimizer/skipped`` is 1).
    ``compilations``: how many programs were compiled so far, one a batch shape.
    """

    objective: Objective
    _step: Callable[..., tuple[TrainState, dict[str, jax.Array]]]
    _config: ModelConfig
    _mesh: Mesh | None
    _parts: int
    _jitted: Any = field(default=None)
    compilations: int = 0

    def __call__(
        self,
        state: TrainState,
        batch: Batch,
        unembeddings: Mapping[str, jax.Array] | None = None,
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        check_rows(batch, self._parts)
        self.objective.require(outputs=self.objective.needs, scores=frozenset(batch.scores))
        absent = self.teachers - set(batch.hidden)
        if absent:
            raise ValueError(
                f"a divergence needs the hidden states of teacher {', '.join(sorted(absent))}: "
                "add them with batch.with_hidden"
            )
        given = dict(unembeddings or {})
        if self._mesh is None:
            if self._jitted is None:
                self._jitted = jax.jit(self._step, donate_argnums=0)
            return self._run(state, batch, given)
        if self._jitted is None:
            # The state comes back exactly as it went in, or the next call would recompile.
            shardings = state_shardings(state, self._config, self._mesh)
            self._jitted = jax.jit(
                self._step,
                donate_argnums=0,
                in_shardings=(shardings, None, None),
                out_shardings=(shardings, replicated(self._mesh)),
            )
            state = jax.device_put(state, shardings)
        return self._run(state, place_batch(batch, self._mesh), given)

    def _run(self, *arguments: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        # Counted as XLA sees them: the cache of a jitted function may forget its entries, and
        # one of another sharding or layout is compiled without being traced again.
        before = compilations()
        result: tuple[TrainState, dict[str, jax.Array]] = self._jitted(*arguments)
        self.compilations += compilations() - before
        return result

    @property
    def teachers(self) -> frozenset[str]:
        """Teachers whose hidden states the batch must hold."""
        return frozenset(name for name, _ in _divergences(self.objective.needs))


def make_update(
    model_config: ModelConfig,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    mesh: Mesh | None = None,
    micro_batches: int = 1,
    temperature: float = 1.0,
    outputs: Mapping[str, OutputFn] | None = None,
    scores: frozenset[str] | None = None,
    ema_rate: float = 0.05,
) -> Update:
    """Builds the update of ``objective``.

    ``micro_batches`` cuts the rows (R must be a multiple of it, times ``data * fsdp`` of the
    mesh) to save memory. ``temperature`` must be the sampler's: log-probabilities are of
    log-softmax(logits / temperature) on both sides. ``outputs`` computes what the
    objective needs beyond log-probabilities, entropy and divergences (whose teachers' hidden
    states the batch must hold). With ``scores``, the names the run will provide, a missing
    one is reported here rather than at the first batch. ``ema_rate``: how far a state's
    moving average, where it keeps one, moves towards the new weights.

    Raises ValueError naming the term when the objective needs something not provided.
    """
    extra = dict(outputs or {})
    wanted = _divergences(objective.needs)
    given = MODEL_OUTPUTS | frozenset(extra) | {f"divergence:{t}:{kind}" for t, kind in wanted}
    objective.require(outputs=given, scores=scores)
    if not 0 < ema_rate <= 1:
        raise ValueError(f"ema_rate must lie in 0..1 (0 excluded), got {ema_rate}")
    if micro_batches < 1:
        raise ValueError(f"micro_batches must be at least 1, got {micro_batches}")
    needs = objective.needs | {"logprobs"}
    schedule = getattr(optimizer, "schedule", None)

    def step(
        state: TrainState, batch: Batch, unembeddings: Mapping[str, jax.Array]
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        own = unembedding_table(state.params if state.ema is None else state.ema)
        tables = {name: unembeddings.get(name, own) for name, _ in wanted}
        run = partial(_outputs, model_config, needs, temperature, extra, tables)

        def evaluate(found: Outputs) -> tuple[jax.Array, tuple[dict[str, jax.Array], Outputs]]:
            loss, metrics = objective(found, batch, state.step)
            return loss, (metrics, found)

        gradients, (metrics, found) = _gradients(
            run, evaluate, objective.token_local, state.params, batch, micro_batches, mesh
        )
        changes, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, changes)
        norm = optax.global_norm(gradients)
        # One bad batch must not cost the weights: nothing of it is applied, and it is counted.
        sound = jnp.isfinite(norm)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(sound, new, old),
            (params, opt_state),
            (state.params, state.opt_state),
        )
        metrics = {
            **metrics,
            **diagnostics(found["logprobs"], batch, state.step),
            "optimizer/grad_norm": norm,
            "optimizer/skipped": ~sound,
            "optimizer/update_norm": optax.global_norm(changes),
            "optimizer/param_norm": optax.global_norm(params),
        }
        if schedule is not None:
            metrics["optimizer/learning_rate"] = schedule(state.step)
        metrics = {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items()}
        ema = state.ema
        if ema is not None:
            ema = jax.tree.map(lambda old, new: old + ema_rate * (new - old), ema, params)
        new: TrainState = state.replace(  # type: ignore[attr-defined]
            step=state.step + 1, params=params, opt_state=opt_state, ema=ema
        )
        return new, metrics

    return Update(objective, step, model_config, mesh, micro_batches * _devices(mesh))


def make_scorer(
    model_config: ModelConfig,
    *,
    mesh: Mesh | None = None,
    micro_batches: int = 1,
    temperature: float = 1.0,
) -> Callable[[Params, Batch], jax.Array]:
    """``score(params, batch) -> [R,T]`` float32: log-probabilities of a batch's own tokens.

    What ``batch.with_score("reference", ...)`` and ``"proximal"`` are made of. Compiles once
    a batch shape, whichever parameters it is given.
    """
    run = partial(_outputs, model_config, frozenset({"logprobs"}), temperature, {}, {})

    @jax.jit
    def scored(params: Params, batch: Batch) -> jax.Array:
        if micro_batches == 1:
            return run(params, batch)["logprobs"]
        pieces = _split(batch, micro_batches, mesh)
        found = jax.lax.map(lambda rows: run(params, rows)["logprobs"], pieces)
        return _join(found)

    def score(params: Params, batch: Batch) -> jax.Array:
        check_rows(batch, micro_batches * _devices(mesh))
        # Scores that are there already would only make for more shapes to compile.
        bare: Batch = batch.replace(scores={}, extras={}, hidden={})  # type: ignore[attr-defined]
        return scored(params, bare if mesh is None else place_batch(bare, mesh))

    return score


def place_batch(batch: Batch, mesh: Mesh) -> Batch:
    """Puts a batch on the mesh: rows over ("data", "fsdp"), the [E] arrays everywhere."""
    check_rows(batch, _devices(mesh))
    rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    whole = replicated(mesh)
    shardings = jax.tree_util.tree_map_with_path(
        lambda path, _: rows if path[0].name in _ROW_FIELDS else whole, batch
    )
    placed: Batch = jax.device_put(batch, shardings)
    return placed


def diagnostics(logprobs: jax.Array, batch: Batch, version: jax.Array) -> dict[str, jax.Array]:
    """Metrics every run logs, whatever its objective.

    ``rollout/logprob_gap_*``: |trainer - sampler| over episodes that the weights of this very
    ``version`` drew from their first token on, where only arithmetic can differ (0 where
    there is none: ``rollout/current_tokens`` says). A token drawn after a swap of weights
    within its episode also saw keys and values of the weights before.
    """
    actions, seen = action_mask(batch), observation_mask(batch)
    gap = jnp.abs(select(actions, logprobs) - jnp.asarray(batch.behavior_logprobs))
    current = actions & per_token(batch, jnp.asarray(batch.versions) == version)
    age = version - jnp.asarray(batch.policy_versions)
    count = jnp.sum(actions)
    padding = jnp.asarray(batch.segment_ids) == 0
    return {
        "batch/action_tokens": count,
        "batch/observation_tokens": jnp.sum(seen),
        "batch/padding_fraction": jnp.mean(padding.astype(jnp.float32)),
        "batch/episodes": jnp.sum(batch.valid),
        "batch/action_nll": ratio(-jnp.sum(select(actions, logprobs)), count),
        "batch/observation_nll": ratio(-jnp.sum(select(seen, logprobs)), jnp.sum(seen)),
        "rollout/current_tokens": jnp.sum(current),
        "rollout/logprob_gap_mean": ratio(jnp.sum(select(current, gap)), jnp.sum(current)),
        "rollout/logprob_gap_max": jnp.max(select(current, gap), initial=0.0),
        "rollout/staleness_mean": ratio(jnp.sum(select(actions, age)), count),
        "rollout/staleness_max": jnp.max(jnp.where(actions, age, 0), initial=0),
    }


def check_rows(batch: Batch, parts: int) -> None:
    """Raises ValueError unless the rows divide into ``parts``."""
    if np.shape(batch.tokens)[0] % parts:
        raise ValueError(
            f"the batch has {batch.num_rows} rows, not a multiple of micro-batches x devices "
            f"= {parts}: pack with rows_multiple={parts}"
        )


def _outputs(
    config: ModelConfig,
    needs: frozenset[str],
    temperature: float,
    extra: Mapping[str, OutputFn],
    tables: Mapping[str, jax.Array],
    params: Params,
    rows: Batch,
) -> dict[str, jax.Array]:
    """What one forward pass yields for ``rows``, [r,T] each."""
    wanted = _divergences(needs)
    hidden, _ = forward(params, config, rows.tokens, rows.positions, rows.segment_ids)
    found = shift_logprobs(
        params,
        config,
        hidden,
        rows.tokens,
        rows.segment_ids,
        temperature=temperature,
        entropy="entropy" in needs,
        teachers=[Teacher(kind, rows.hidden[name], tables[name]) for name, kind in wanted],
    )
    outputs = {"logprobs": found.logprobs}
    for (name, kind), apart in zip(wanted, found.divergences, strict=True):
        outputs[f"divergence:{name}:{kind}"] = apart
    if found.entropy is not None:
        outputs["entropy"] = found.entropy
    outputs |= {name: fn(params, hidden, rows) for name, fn in extra.items() if name in needs}
    return outputs


def _divergences(needs: frozenset[str]) -> list[tuple[str, DivergenceKind]]:
    """``(teacher, kind)`` of every output ``"divergence:<teacher>:<kind>"``."""
    found: list[tuple[str, DivergenceKind]] = []
    for need in sorted(needs):
        first, _, rest = need.partition(":")
        name, _, kind = rest.partition(":")
        if first == "divergence" and kind in get_args(DivergenceKind):
            found.append((name, kind))  # type: ignore[arg-type]
    return found


def _gradients(
    run: Callable[[Params, Batch], Outputs],
    evaluate: Callable[[Outputs], tuple[jax.Array, Any]],
    token_local: bool,
    params: Params,
    batch: Batch,
    micro_batches: int,
    mesh: Mesh | None,
) -> tuple[Params, Any]:
    """Gradient of ``evaluate(run(params, batch))[0]``, and what else it returned."""
    if micro_batches == 1:
        return jax.grad(lambda p: evaluate(run(p, batch)), has_aux=True)(params)
    pieces = _split(batch, micro_batches, mesh)
    cotangent = jax.grad(lambda found: evaluate(found)[0])
    zeros = jax.tree.map(jnp.zeros_like, params)

    if not token_local:
        found = jax.lax.map(lambda rows: run(params, rows), pieces)
        outputs = jax.tree.map(_join, found)
        cotangents = jax.tree.map(lambda x: _cut(x, micro_batches, mesh), cotangent(outputs))

        def add(total: Params, piece: tuple[Batch, Outputs]) -> tuple[Params, None]:
            rows, given = piece
            _, pull = jax.vjp(lambda p: run(p, rows), params)
            return jax.tree.map(jnp.add, total, pull(given)[0]), None

        gradients, _ = jax.lax.scan(add, zeros, (pieces, cotangents))
        return gradients, evaluate(outputs)[1]

    def forward_and_back(total: Params, piece: tuple[jax.Array, Batch]) -> tuple[Params, Outputs]:
        index, rows = piece
        found, pull = jax.vjp(lambda p: run(p, rows), params)
        others = jax.tree.map(
            lambda x: jnp.zeros((micro_batches, *x.shape), x.dtype).at[index].set(x), found
        )
        given = cotangent(jax.tree.map(_join, others))
        given = jax.tree.map(lambda x: _cut(x, micro_batches, mesh)[index], given)
        return jax.tree.map(jnp.add, total, pull(given)[0]), found

    gradients, found = jax.lax.scan(forward_and_back, zeros, (jnp.arange(micro_batches), pieces))
    return gradients, evaluate(jax.tree.map(_join, found))[1]


def _cut(x: jax.Array, parts: int, mesh: Mesh | None) -> jax.Array:
    """[R, ...] to [parts, R / parts, ...], row r going to part r % parts.

    Strided, so that every device keeps the rows it has and takes part in every piece.
    """
    x = jnp.asarray(x)
    pieces = jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1)
    if mesh is None:
        return pieces
    sharding = NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))
    return jax.lax.with_sharding_constraint(pieces, sharding)


def _join(pieces: jax.Array) -> jax.Array:
    """The inverse of :func:`_cut`."""
    swapped = jnp.swapaxes(pieces, 0, 1)
    return swapped.reshape(-1, *swapped.shape[2:])


def _split(batch: Batch, parts: int, mesh: Mesh | None) -> Batch:
    """The batch with [parts, R / parts, T] row fields and the [E] arrays repeated."""

    def cut(path: Any, x: Any) -> jax.Array:
        if path[0].name in _ROW_FIELDS:
            return _cut(x, parts, mesh)
        return jnp.broadcast_to(jnp.asarray(x), (parts, *np.shape(x)))

    pieces: Batch = jax.tree_util.tree_map_with_path(cut, batch)
    return pieces


def _devices(mesh: Mesh | None) -> int:
    return 1 if mesh is None else int(np.prod([mesh.shape[axis] for axis in BATCH_AXES]))
