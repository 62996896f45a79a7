"""What a teacher says of a batch's own tokens: the scores named ``teacher/<name>``."""

import jax
import jax.numpy as jnp

from jaxagent.data.batch import Batch, action_mask
from jaxagent.losses.base import select
from jaxagent.losses.policy import OldPolicy, old_logprobs


def teacher_score(teacher: str) -> str:
    """The score that holds the teacher's log-probabilities; ValueError for an empty name."""
    if not isinstance(teacher, str) or not teacher or "/" in teacher or ":" in teacher:
        raise ValueError(f"teacher must be a name without '/' or ':', got {teacher!r}")
    return f"teacher/{teacher}"


def teacher_mask(batch: Batch, teacher: str) -> jax.Array:
    """[R,T] bool: the ACTION tokens the teacher covers.

    All of them, unless ``scores["teacher/<name>/mask"]`` (1 or 0) says which.
    """
    mask = action_mask(batch)
    covered = batch.scores.get(f"{teacher_score(teacher)}/mask")
    return mask if covered is None else mask & (jnp.asarray(covered) > 0)


def teacher_logprobs(batch: Batch, teacher: str) -> jax.Array:
    """[R,T], without gradient; anything at all off :func:`teacher_mask`."""
    return jax.lax.stop_gradient(jnp.asarray(batch.scores[teacher_score(teacher)]))


def teacher_gap(batch: Batch, teacher: str, old: OldPolicy) -> tuple[jax.Array, jax.Array]:
    """``log p_teacher - log p_old`` [R,T], 0 off :func:`teacher_mask`, and that mask.

    Without gradient.
    """
    covered = teacher_mask(batch, teacher)
    told = select(covered, teacher_logprobs(batch, teacher))
    return told - select(covered, old_logprobs(batch, old)), covered
