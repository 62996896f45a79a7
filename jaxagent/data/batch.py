"""The one batch every loss and credit method reads: rows of packed episodes.

``R`` rows of ``T`` tokens hold the contexts of ``E`` episodes. Index ``t`` always
describes token ``t`` as the *target* predicted from what precedes it, so
``behavior_logprobs[r, t]``, the trainer's log-probabilities, advantages and masks all
line up with ``tokens[r, t]``.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxagent.data.kinds import Kind

# NumPy arrays before the transfer, jax.Arrays after it, tracers inside jit.
Array = Any


@flax.struct.dataclass
class Batch:
    """Packed episodes. Arrays may be NumPy (as ``pack`` returns them) or on a device.

    | field | shape, dtype | meaning |
    | --- | --- | --- |
    | tokens, positions | [R,T] int32 | positions count from 0 in every context |
    | segment_ids | [R,T] int32 | 0 = padding; within a row one id a context |
    | episode_ids | [R,T] int32 | index into the [E] arrays; E = padding (an extra bin) |
    | kind | [R,T] uint8 | see :class:`jaxagent.data.kinds.Kind` |
    | turn_ids | [R,T] int32 | turn within the episode; -1 in the prompt and padding |
    | behavior_logprobs | [R,T] f32 | recorded when the token was drawn; 0 off ACTION |
    | policy_versions | [R,T] int32 | weights that drew the token; -1 off ACTION |
    | advantages | [R,T] f32 | filled by a credit pipeline; 0 off ACTION |
    | rewards | [E] f32 | the outcome; 0 for invalid and padding episodes |
    | valid | [E] bool | False: environment failed, masked, or padding |
    | truncated | [E] bool | a limit ended the episode |
    | group_ids | [E] int32 | dense from 0; E = padding |
    | versions | [E] int32 | oldest weights that drew one of its tokens; -1 if none |
    | turn_rewards | [E,K] f32 | 0 beyond an episode's last turn |
    | scores | name -> [R,T] f32 | extra forward passes: "reference", "proximal", ... |
    """

    tokens: Array
    positions: Array
    segment_ids: Array
    episode_ids: Array
    kind: Array
    turn_ids: Array
    behavior_logprobs: Array
    policy_versions: Array
    advantages: Array
    rewards: Array
    valid: Array
    truncated: Array
    group_ids: Array
    versions: Array
    turn_rewards: Array
    scores: dict[str, Array] = flax.struct.field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def row_length(self) -> int:
        return int(self.tokens.shape[1])

    @property
    def num_episodes(self) -> int:
        """E, padding episodes included."""
        return int(self.rewards.shape[0])

    def with_score(self, name: str, values: Array) -> "Batch":
        """Adds one extra forward pass, ``values`` [R,T]."""
        if values.shape != self.tokens.shape:
            raise ValueError(
                f"score {name!r} has shape {values.shape}, the batch needs {self.tokens.shape}"
            )
        scored: Batch = self.replace(scores={**self.scores, name: values})  # type: ignore[attr-defined]
        return scored


def per_token(batch: Batch, values: Array) -> jax.Array:
    """Spreads ``values`` [E] over the tokens of each episode: [R,T], 0 on padding."""
    values = jnp.asarray(values)
    padded = jnp.concatenate([values, jnp.zeros((1,), values.dtype)])
    return padded[batch.episode_ids]


def episode_sum(batch: Batch, values: Array) -> jax.Array:
    """Sums ``values`` [R,T] over each episode, all its contexts together: [E].

    A segment sum over ``episode_ids``, so it is exact however the episode is packed
    or sharded. Padding falls into an extra bin that is dropped.
    """
    count = batch.num_episodes
    summed = jax.ops.segment_sum(
        jnp.asarray(values).reshape(-1),
        jnp.asarray(batch.episode_ids).reshape(-1),
        num_segments=count + 1,
    )
    return summed[:count]


def action_mask(batch: Batch) -> jax.Array:
    """[R,T] bool: tokens the policy sampled, in valid episodes."""
    return (jnp.asarray(batch.kind) == Kind.ACTION) & per_token(batch, batch.valid)


def observation_mask(batch: Batch) -> jax.Array:
    """[R,T] bool: the environment's own tokens after the first action, in valid episodes.

    ``turn_ids`` is -1 in the prompt and an observation carries the id of the turn that
    caused it, so what the environment said before any action is left out; TEMPLATE
    tokens (role markers, truncation notices) are never in.
    """
    return (
        (jnp.asarray(batch.kind) == Kind.OBSERVATION)
        & (jnp.asarray(batch.turn_ids) >= 0)
        & per_token(batch, batch.valid)
    )
