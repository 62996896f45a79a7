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
    | extras | name -> [E, ...] | what only some methods read: "gold_logprobs" [E,K+1], ... |
    | hidden | name -> [R,T,D] | a teacher's final hidden state that predicts the token |
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
    extras: dict[str, Array] = flax.struct.field(default_factory=dict)
    hidden: dict[str, Array] = flax.struct.field(default_factory=dict)

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

    @property
    def num_turns(self) -> int:
        """K, the turns there is room for."""
        return int(self.turn_rewards.shape[1])

    def with_score(self, name: str, values: Array) -> "Batch":
        """Adds one extra forward pass, ``values`` [R,T]."""
        if values.shape != self.tokens.shape:
            raise ValueError(
                f"score {name!r} has shape {values.shape}, the batch needs {self.tokens.shape}"
            )
        scored: Batch = self.replace(scores={**self.scores, name: values})  # type: ignore[attr-defined]
        return scored

    def with_extra(self, name: str, values: Array) -> "Batch":
        """Adds ``values`` [E], [E,K] or [E,K+1] (the boundaries around each turn)."""
        if not values.shape or values.shape[0] != self.num_episodes:
            raise ValueError(
                f"extra {name!r} has shape {values.shape}, its leading axis must be the batch's "
                f"{self.num_episodes} episodes, padding included"
            )
        extended: Batch = self.replace(extras={**self.extras, name: values})  # type: ignore[attr-defined]
        return extended

    def with_hidden(self, name: str, values: Array) -> "Batch":
        """Adds the hidden states [R,T,D] of teacher ``name``, for full divergences."""
        if values.shape[:-1] != self.tokens.shape:
            raise ValueError(
                f"hidden {name!r} has shape {values.shape}, the batch needs "
                f"{(*self.tokens.shape, 'D')}"
            )
        extended: Batch = self.replace(hidden={**self.hidden, name: values})  # type: ignore[attr-defined]
        return extended


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


def episode_token_mean(batch: Batch, values: Array, mask: Array) -> jax.Array:
    """Mean of ``values`` [R,T] over each episode's tokens in ``mask``: [E], 0 without any."""
    values = jnp.where(mask, values, 0.0)
    counts = episode_sum(batch, mask.astype(values.dtype))
    return episode_sum(batch, values) / jnp.maximum(counts, 1)


def episode_max(batch: Batch, values: Array) -> jax.Array:
    """The largest of ``values`` [R,T] over each episode: [E], -inf without tokens."""
    count = batch.num_episodes
    found = jax.ops.segment_max(
        jnp.asarray(values).reshape(-1),
        jnp.asarray(batch.episode_ids).reshape(-1),
        num_segments=count + 1,
    )
    return found[:count]


def per_turn_token(batch: Batch, values: Array) -> jax.Array:
    """Spreads ``values`` [E,K] over the tokens of each turn: [R,T], 0 in prompts and padding."""
    values = jnp.asarray(values)
    padded = jnp.pad(values, ((0, 1), (0, 1)))
    turns = jnp.asarray(batch.turn_ids)
    turns = jnp.where((turns >= 0) & (turns < batch.num_turns), turns, batch.num_turns)
    return padded[jnp.asarray(batch.episode_ids), turns]


def turn_sum(batch: Batch, values: Array) -> jax.Array:
    """Sums ``values`` [R,T] over each turn of each episode: [E,K]; prompts are left out."""
    episodes, turns = jnp.asarray(batch.episode_ids), jnp.asarray(batch.turn_ids)
    count = batch.num_episodes * batch.num_turns
    inside = (turns >= 0) & (turns < batch.num_turns)
    ids = jnp.where(inside, episodes * batch.num_turns + turns, count)
    summed = jax.ops.segment_sum(
        jnp.asarray(values).reshape(-1),
        jnp.minimum(ids, count).reshape(-1),
        num_segments=count + 1,
    )
    return summed[:count].reshape(batch.num_episodes, batch.num_turns)


def turn_mask(batch: Batch) -> jax.Array:
    """[E,K] bool: turns in which the policy sampled a token, in valid episodes."""
    return turn_sum(batch, action_mask(batch).astype(jnp.int32)) > 0


def last_turn_mask(batch: Batch) -> jax.Array:
    """[E,K] bool: the last turn of each episode that has one."""
    turns = turn_mask(batch)
    later = jnp.cumsum(turns[:, ::-1], axis=1)[:, ::-1] - turns
    return turns & (later == 0)


def token_order(batch: Batch, mask: Array) -> jax.Array:
    """[R*T]: indices that sort the flattened tokens by episode, turn and position.

    The contexts of an episode may lie in any rows: this is the order in which it happened.
    Tokens off ``mask`` [R,T] come last.
    """
    episodes = jnp.where(mask, jnp.asarray(batch.episode_ids), batch.num_episodes)
    keys = (jnp.asarray(batch.positions), jnp.asarray(batch.turn_ids), episodes)
    return jnp.lexsort([key.reshape(-1) for key in keys])


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
