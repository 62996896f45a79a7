"""AdamW with a schedule per update, clipping of the whole gradient, and a decay mask."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

ScheduleKind = Literal["constant", "linear", "cosine"]


class Optimizer(NamedTuple):
    """An optax transformation (it has ``init`` and ``update``) that also tells its schedule."""

    init: optax.TransformInitFn
    update: optax.TransformUpdateFn
    schedule: optax.Schedule


def learning_rate_schedule(
    peak: float,
    kind: ScheduleKind = "constant",
    *,
    warmup_steps: int = 0,
    total_steps: int | None = None,
    end: float = 0.0,
) -> optax.Schedule:
    """Linear warm-up to ``peak``, then constant, or down to ``end`` at ``total_steps``.

    Counted in updates, never in micro-batches. The first update already has
    ``peak / warmup_steps``, not 0.
    """
    if kind not in ("constant", "linear", "cosine"):
        raise ValueError(f"kind must be 'constant', 'linear' or 'cosine', got {kind!r}")
    if kind != "constant" and (total_steps is None or total_steps <= warmup_steps):
        raise ValueError(f"kind={kind!r} needs total_steps above warmup_steps={warmup_steps}")
    length = 1 if total_steps is None else max(total_steps - warmup_steps, 1)

    def schedule(step: Any) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        done = jnp.clip((step - warmup_steps) / length, 0.0, 1.0)
        if kind == "cosine":
            done = 0.5 * (1 - jnp.cos(jnp.pi * done))
        rate = peak if kind == "constant" else peak + (end - peak) * done
        warm = jnp.minimum((step + 1) / warmup_steps, 1.0) if warmup_steps else 1.0
        return jnp.asarray(rate * warm, jnp.float32)

    return schedule


def decay_mask(params: Any) -> Any:
    """True for the matrices: what weight decay acts on.

    Norms and biases are found by name, and everything with fewer than two axes a layer by
    shape (arrays under ``"layers"`` lead with the layer axis, which does not count).
    """

    def decays(path: Any, leaf: Any) -> bool:
        names = [str(getattr(key, "key", key)) for key in path]
        if any("norm" in name or "bias" in name for name in names):
            return False
        return np.ndim(leaf) - ("layers" in names) >= 2

    return jax.tree_util.tree_map_with_path(decays, params)


def adamw(
    learning_rate: float | optax.Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = 1.0,
) -> Optimizer:
    """AdamW. The gradient it is given is that of the whole update, so the norm is clipped
    after accumulation; moments are float32; decay spares norms and biases."""
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be above 0 (or None), got {max_grad_norm}")
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must be at least 0, got {weight_decay}")
    schedule = learning_rate if callable(learning_rate) else optax.constant_schedule(learning_rate)
    steps = [] if max_grad_norm is None else [optax.clip_by_global_norm(max_grad_norm)]
    steps.append(optax.scale_by_adam(b1=b1, b2=b2, eps=eps, mu_dtype=jnp.float32))
    if weight_decay:
        steps.append(optax.add_decayed_weights(weight_decay, mask=decay_mask))
    steps.append(optax.scale_by_learning_rate(schedule))
    chained = optax.chain(*steps)
    return Optimizer(chained.init, chained.update, schedule)


def muon(
    learning_rate: float | optax.Schedule,
    *,
    adam_learning_rate: float | optax.Schedule,
    beta: float = 0.95,
    b1: float = 0.9,
    b2: float = 0.95,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = 1.0,
) -> Optimizer:
    """Muon for the layers' matrices, Adam for embeddings, norms and biases.

    Small models trained from scratch need about half the tokens that AdamW needs. From
    ``optax.contrib.muon`` (Jordan et al., 2024, github.com/KellerJordan/Muon); each layer
    of a stacked matrix is orthogonalised on its own. ``learning_rate`` is Muon's.
    """
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be above 0 (or None), got {max_grad_norm}")
    per_layer = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)

    def dimensions(params: Any) -> Any:
        def one(path: Any, matrix: bool) -> optax.contrib.MuonDimensionNumbers | None:
            inside = any(getattr(key, "key", None) == "layers" for key in path)
            return per_layer if matrix and inside else None

        return jax.tree_util.tree_map_with_path(one, decay_mask(params))

    schedule = learning_rate if callable(learning_rate) else optax.constant_schedule(learning_rate)
    chained = optax.chain(
        optax.identity() if max_grad_norm is None else optax.clip_by_global_norm(max_grad_norm),
        optax.contrib.muon(
            schedule,
            beta=beta,
            adam_b1=b1,
            adam_b2=b2,
            weight_decay=weight_decay,
            adam_learning_rate=adam_learning_rate,
            muon_weight_dimension_numbers=dimensions,
            mu_dtype=jnp.float32,
        ),
    )
    return Optimizer(chained.init, chained.update, schedule)
