"""Credit from the structure of episodes: roles, trees, windows, imagined alternatives."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxagent.credit.base import Credit, CreditMetrics
from jaxagent.credit.group import dense_ids, group_metrics, group_stats, segment_stats
from jaxagent.credit.rewards import RewardTransform
from jaxagent.data.batch import Batch, last_turn_mask, per_turn_token, turn_mask
from jaxagent.losses.base import ratio


class Role(IntEnum):
    """What a turn did for the task, as a judge labels it; any other id is no label."""

    DECISIVE = 0
    EXPLORATION = 1
    NO_PROGRESS = 2
    REGRESSION = 3


def role_shift(
    decisive: float = 0.5,
    exploration: float = 0.2,
    no_progress: float = -0.1,
    regression: float = -0.5,
) -> Credit:
    """Adds a constant to every token of a turn by its role, ``extras["roles"]`` [E,K] (TRIAGE).

    Ids are those of :class:`Role`; a turn without a label is left as it is. Derived from the
    abstract of TRIAGE: the constants are placeholders.
    """
    shifts = (decisive, exploration, no_progress, regression)
    if not np.all(np.isfinite(shifts)):
        raise ValueError(f"the shifts of role_shift must be finite, got {shifts}")

    def fn(batch: Batch, advantages: jax.Array) -> tuple[jax.Array, CreditMetrics]:
        roles = jnp.asarray(batch.extras["roles"]).astype(jnp.int32)
        labelled = turn_mask(batch) & (roles >= 0) & (roles < len(shifts))
        table = jnp.asarray(shifts, advantages.dtype)
        shift = jnp.where(labelled, table[jnp.clip(roles, 0, len(shifts) - 1)], 0.0)
        return advantages + per_turn_token(batch, shift), {}

    return Credit(fn, extras=frozenset({"roles"}), stage="additive")


def tree_advantage() -> Credit:
    """``A(n) = V(n) - V(parent(n))`` over a tree of turns, V the mean outcome of the leaves below
    (TreePS-RAG).

    ``extras["node_ids"]`` and ``extras["parent_ids"]`` [E,K] name the node of each turn and
    the one above it, unique within a group. A parent that is negative, or the node of no
    turn, is the root, whose value is the mean of the group. A turn without a node (negative
    id) gets 0.

    What episodes share counts once: a leaf that several episodes end in is one leaf, and a
    node that m episodes hold, whose tokens are thus in the batch m times, gives each copy
    ``A(n) / m``.

    Derived from the abstract of TreePS-RAG.
    """

    def fn(batch: Batch, advantages: jax.Array) -> tuple[jax.Array, CreditMetrics]:
        nodes = jnp.asarray(batch.extras["node_ids"])
        parents = jnp.asarray(batch.extras["parent_ids"])
        rewards, valid = jnp.asarray(batch.rewards), jnp.asarray(batch.valid)
        groups = jnp.asarray(batch.group_ids)
        counted = turn_mask(batch) & (nodes >= 0)
        bins = 2 * nodes.size + batch.num_episodes + 1
        one = jnp.ones((), rewards.dtype)

        def total(ids: jax.Array, values: jax.Array) -> jax.Array:
            return jax.ops.segment_sum(values.reshape(-1), ids.reshape(-1), num_segments=bins)

        # Each of the m episodes that end in the same node stands for 1/m of a leaf.
        own = -1 - jnp.arange(batch.num_episodes)
        ends = jnp.any(counted & last_turn_mask(batch), axis=1)
        end = jnp.sum(jnp.where(last_turn_mask(batch), nodes, 0), axis=1)
        leaves = dense_ids(groups, jnp.where(ends, end, own))
        leaf = jnp.where(valid, ratio(one, total(leaves, valid.astype(one.dtype))[leaves]), 0.0)
        root = ratio(total(groups, leaf * rewards), total(groups, leaf))[groups]

        # A node that spans several turns of an episode is in it once.
        shape = nodes.shape
        episodes = jnp.broadcast_to(jnp.arange(batch.num_episodes)[:, None], shape)
        spans = dense_ids(episodes.reshape(-1), nodes.reshape(-1)).reshape(shape)
        once = jnp.where(counted, ratio(one, total(spans, counted.astype(one.dtype))[spans]), 0.0)
        weight = once * leaf[:, None]

        both = jnp.stack([nodes, parents])
        grouped = jnp.broadcast_to(groups[None, :, None], both.shape)
        node, parent = dense_ids(grouped.reshape(-1), both.reshape(-1)).reshape(both.shape)
        mass = total(node, weight)
        value = ratio(total(node, weight * rewards[:, None]), mass)
        above = jnp.where((parents >= 0) & (mass[parent] > 0), value[parent], root[:, None])
        copies = total(node, once)[node]
        stats = group_stats(batch, rewards)
        # Equal outcomes can differ by a rounding of their means: not a difference to learn from.
        learns = counted & stats.signal[:, None]
        found = jnp.where(learns, ratio(value[node] - above, copies), 0.0)
        return per_turn_token(batch, found), group_metrics(batch, stats)

    return Credit(fn, extras=frozenset({"node_ids", "parent_ids"}), stage="base")


def window_advantage(normalise: Literal["group", "none"] = "group", eps: float = 1e-6) -> Credit:
    """All turns of a window share its reward; no return crosses a window (WIRL).

    ``extras["window_ids"]`` [E,K]: the turns between two results of an episode have one id. A
    window's reward is the sum of its ``turn_rewards`` (see :func:`best_so_far`), normalised
    to ``(r - mean_g) / (std_g + eps)`` over the windows of the group, each counted once,
    sample deviation. Equal windows, a single one, and negative ids get 0.

    Derived from the abstract of WIRL.
    """
    if normalise not in ("group", "none"):
        raise ValueError(f"normalise must be 'group' or 'none', got {normalise!r}")
    if not eps > 0:
        raise ValueError(f"eps must be above 0, got {eps}")

    def fn(batch: Batch, advantages: jax.Array) -> tuple[jax.Array, CreditMetrics]:
        windows = jnp.asarray(batch.extras["window_ids"])
        shape, size = windows.shape, windows.size
        inside = (turn_mask(batch) & (windows >= 0)).reshape(-1)
        episodes = jnp.broadcast_to(jnp.arange(batch.num_episodes)[:, None], shape)
        ids = dense_ids(episodes.reshape(-1), windows.reshape(-1))
        given = jnp.where(inside, jnp.asarray(batch.turn_rewards).reshape(-1), 0.0)
        values = jax.ops.segment_sum(given, ids, num_segments=size)[ids]
        if normalise == "group":
            place = jnp.where(inside, jnp.arange(size), size)
            first = jax.ops.segment_min(place, ids, num_segments=size)[ids] == place
            groups = jnp.broadcast_to(jnp.asarray(batch.group_ids)[:, None], shape).reshape(-1)
            stats = segment_stats(groups, values, first & inside, batch.num_episodes + 1)
            values = jnp.where(stats.signal, values - stats.mean, 0.0) / (stats.std + eps)
        found = jnp.where(inside, values, 0.0).reshape(shape)
        metrics = group_metrics(batch, group_stats(batch, jnp.asarray(batch.rewards)))
        return per_turn_token(batch, found), metrics

    return Credit(fn, extras=frozenset({"window_ids"}), stage="base")


def best_so_far(start: float = 0.0) -> RewardTransform:
    """Turn rewards that are scores become gains over the best score so far, ``start`` at first.

    A turn without a result needs a score of at most ``start`` (such as 0) to gain nothing.
    """
    if not np.isfinite(start):
        raise ValueError(f"start must be finite, got {start}")

    def transform(batch: Batch) -> tuple[Batch, dict[str, jax.Array]]:
        scores = jnp.where(turn_mask(batch), jnp.asarray(batch.turn_rewards), start)
        best = jnp.pad(jax.lax.cummax(jnp.maximum(scores, start), axis=1), ((0, 0), (1, 0)))
        best = best.at[:, 0].set(start)
        shaped: Batch = batch.replace(turn_rewards=best[:, 1:] - best[:, :-1])  # type: ignore[attr-defined]
        return shaped, {}

    return transform


def imagined_advantage(weight: float = 1.0) -> Credit:
    """Adds ``weight * gate * (v_0 - mean_j v_j)``: the deed against what was imagined (WM-PPO).

    ``extras["imagined_values"]`` [E,K,J] holds the critic's values of the successors that a
    world model predicts for J sampled actions of each turn, the executed one first;
    ``extras["imagined_gates"]`` [E,K] in 0..1 how far such comparisons are to be trusted (see
    :class:`ComparisonRecord`). With a gate of 0, or one action, it adds 0. Goes on top of
    :func:`jaxagent.credit.gae.gae`; :func:`imagined_targets` serves the critic.

    Derived from the abstract of WM-PPO.
    """
    if not weight > 0:
        raise ValueError(f"weight must be above 0, got {weight}")

    def fn(batch: Batch, advantages: jax.Array) -> tuple[jax.Array, CreditMetrics]:
        values, gates = _imagined(batch)
        shift = gates * (values[..., 0] - jnp.mean(values, axis=-1))
        return advantages + weight * per_turn_token(batch, shift), {}

    extras = frozenset({"imagined_values", "imagined_gates"})
    return Credit(fn, extras=extras, stage="additive")


def imagined_targets(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """WM-PPO's auxiliary critic targets ``mean_j v_j`` and their weights, the gates: [E,K] each."""
    values, gates = _imagined(batch)
    return jax.lax.stop_gradient((jnp.mean(values, axis=-1), gates))


def _imagined(batch: Batch) -> tuple[jax.Array, jax.Array]:
    gates = jnp.asarray(batch.extras["imagined_gates"])
    trusted = turn_mask(batch) & (gates > 0)
    values = jnp.asarray(batch.extras["imagined_values"])
    return jnp.where(trusted[..., None], values, 0.0), jnp.where(trusted, gates, 0.0)


@dataclass(frozen=True)
class ComparisonRecord:
    """How often imagined comparisons came out right, by the margin they were won with (WM-PPO).

    Margin bins are ``[0, edges[0]), [edges[0], edges[1]), ...``; a value, passed in and out.
    Derived.
    """

    edges: tuple[float, ...]
    right: tuple[int, ...] = ()
    seen: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(b <= a for a, b in zip((0.0, *self.edges), self.edges, strict=False)):
            raise ValueError(f"edges must rise from above 0, got {self.edges}")
        bins = len(self.edges) + 1
        for name in ("right", "seen"):
            counts = getattr(self, name) or (0,) * bins
            if len(counts) != bins:
                raise ValueError(f"{name} needs one count for each of {bins} bins, got {counts}")
            object.__setattr__(self, name, counts)

    def add(self, margins: ArrayLike, right: Sequence[bool]) -> "ComparisonRecord":
        """The record with more comparisons: their margins, and whether they proved right."""
        bins = self._bins(margins)
        hits = np.asarray(right, np.bool_)
        count = len(self.seen)
        seen = np.bincount(bins, minlength=count) + self.seen
        proved = np.bincount(bins[hits], minlength=count) + self.right
        return replace(self, right=tuple(proved.tolist()), seen=tuple(seen.tolist()))

    def gates(self, margins: ArrayLike) -> NDArray[np.float64]:
        """``max(0, 2 * accuracy - 1)`` of each margin's bin; 0 for a bin without comparisons."""
        accuracy = np.asarray(self.right) / np.maximum(self.seen, 1)
        return np.maximum(2 * accuracy - 1, 0.0)[self._bins(margins)]

    def _bins(self, margins: ArrayLike) -> NDArray[np.intp]:
        return np.digitize(np.abs(np.asarray(margins, np.float64)), self.edges)
