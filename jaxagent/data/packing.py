"""Packs episodes into rows of static shape."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from jaxagent.data.batch import Batch
from jaxagent.data.kinds import Kind
from jaxagent.episodes.episode import Context, Episode

TruncationMode = Literal["mask", "score", "penalise"]


def round_up(count: int, multiple: int = 1) -> int:
    """The smallest of ``multiple`` times 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that holds ``count``.

    Few distinct sizes (two a doubling) keep the number of compilations logarithmic, at
    no more than a third of the rows padded.
    """
    if multiple < 1:
        raise ValueError(f"multiple must be at least 1, got {multiple}")
    units = max(1, -(-count // multiple))
    size = 1 << (units - 1).bit_length()
    if size >= 4 and units <= size * 3 // 4:
        size = size * 3 // 4
    return size * multiple


def first_fit(lengths: Sequence[int], capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First-fit decreasing: ``(row, column)`` of each length, both [n].

    Every length must be in 0..capacity. Uses at most 11/9 of the optimal number of rows
    (+1), and depends on the lengths only.
    """
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    rows = np.zeros(len(lengths), np.int64)
    columns = np.zeros(len(lengths), np.int64)
    free = np.full(len(lengths), capacity, np.int64)
    # Rows before `start` are full: skipping them keeps long lists near linear.
    start = 0
    for index in order:
        need = lengths[index]
        row = start + int(np.argmax(free[start:] >= need))
        rows[index], columns[index] = row, capacity - free[row]
        free[row] -= need
        while start < len(free) and free[start] == 0:
            start += 1
    return rows, columns


@dataclass(frozen=True)
class Placement:
    """Where the contexts of episodes lie in a packed batch; all arrays have one entry a context.

    ``episodes`` and ``contexts``: which context it is, ``contexts`` counting within the
    episode; its token i is at ``[rows, columns + i]`` of rows of ``row_length`` tokens.
    """

    episodes: NDArray[np.int64]
    contexts: NDArray[np.int64]
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    row_length: int

    def start(self, episode: int, context: int) -> int | None:
        """Flat index ``row * row_length + column`` of a context's first token; None if absent."""
        found = np.flatnonzero((self.episodes == episode) & (self.contexts == context))
        if not found.size:
            return None
        return int(self.rows[found[0]]) * self.row_length + int(self.columns[found[0]])


def place(
    episodes: Sequence[Episode],
    *,
    buckets: Sequence[int],
    truncation: TruncationMode = "score",
) -> Placement:
    """Where :func:`pack`, given the same arguments, puts each context.

    Depends on nothing else. Raises ValueError naming the episode whose context is too long.
    """
    owners, numbers, lengths = [], [], []
    for index, episode in enumerate(episodes):
        if is_masked(episode, truncation):
            continue
        for number, context in enumerate(episode.contexts):
            _check_context(context, episode, index, max(buckets))
            if len(context):
                owners.append(index)
                numbers.append(number)
                lengths.append(len(context))
    longest = max(lengths, default=0)
    row_length = min(bucket for bucket in buckets if bucket >= longest)
    rows, columns = first_fit(lengths, row_length)
    return Placement(
        np.asarray(owners, np.int64), np.asarray(numbers, np.int64), rows, columns, row_length
    )


def is_masked(episode: Episode, truncation: TruncationMode) -> bool:
    """Whether the episode takes no row and no part in any loss."""
    return not episode.valid or (truncation == "mask" and episode.truncated is not None)


def pack(
    episodes: Sequence[Episode],
    *,
    buckets: Sequence[int],
    rows: int | None = None,
    rows_multiple: int = 1,
    num_episodes: int | None = None,
    max_turns: int | None = None,
    truncation: TruncationMode = "score",
    truncation_penalty: float = 0.0,
) -> Batch:
    """Packs whole contexts into rows; several contexts of an episode share its id.

    ``buckets``: row lengths T allowed; the smallest that holds the longest context is
    taken for the whole batch. ``rows``, ``num_episodes`` and ``max_turns`` fix R, E and K;
    left out, each is rounded up to a few sizes (:func:`round_up`), R to a multiple of
    ``rows_multiple`` (set it to devices x micro-batches).

    Invalid episodes keep their place in the [E] arrays (``valid`` False, reward 0) but
    take no row. ``truncation`` says what happens to episodes that a limit ended:
    ``"score"`` keeps their reward, ``"penalise"`` subtracts ``truncation_penalty``,
    ``"mask"`` treats them like invalid ones: no loss and no part in group statistics
    (``truncated`` still tells them apart).

    Returns NumPy arrays. Raises ValueError naming the episode when a context is longer
    than the largest bucket, starts with a sampled token, or has too many turns, and when
    a fixed ``rows`` or ``num_episodes`` is too small.
    """
    _check_options(buckets, rows, rows_multiple, truncation, truncation_penalty)
    placement = place(episodes, buckets=buckets, truncation=truncation)
    masked = [is_masked(episode, truncation) for episode in episodes]
    length = placement.row_length
    used = int(placement.rows.max(initial=-1)) + 1
    if rows is None:
        rows = round_up(used, rows_multiple)
    elif used > rows:
        raise ValueError(f"the episodes fill {used} rows of {length} tokens, more than rows={rows}")

    turns = max((_num_turns(e) for e, m in zip(episodes, masked, strict=True) if not m), default=0)
    if max_turns is None:
        max_turns = round_up(turns)
    if num_episodes is None:
        num_episodes = round_up(len(episodes))
    elif len(episodes) > num_episodes:
        raise ValueError(f"{len(episodes)} episodes do not fit num_episodes={num_episodes}")

    fields = _fill_rows(episodes, placement, rows, num_episodes)
    outcome = _fill_episodes(
        episodes,
        masked,
        num_episodes,
        max_turns,
        truncation_penalty if truncation == "penalise" else 0.0,
    )
    return Batch(**fields, **outcome)


def unpack(batch: Batch, field: str = "tokens") -> list[list[NDArray[np.generic]]]:
    """``field`` [R,T] of every context, by episode: the inverse of :func:`pack` on the host."""
    values, segments = np.asarray(getattr(batch, field)), np.asarray(batch.segment_ids)
    episode_ids = np.asarray(batch.episode_ids)
    found: list[list[NDArray[np.generic]]] = [[] for _ in range(batch.num_episodes)]
    for row in range(batch.num_rows):
        for segment in range(1, int(segments[row].max(initial=0)) + 1):
            where = np.flatnonzero(segments[row] == segment)
            found[int(episode_ids[row, where[0]])].append(values[row, where])
    return found


def _fill_rows(
    episodes: Sequence[Episode], placement: Placement, rows: int, padding_id: int
) -> dict[str, Any]:
    """All [R,T] fields, by one scatter each."""
    length, at_row, at_column = placement.row_length, placement.rows, placement.columns
    owners = placement.episodes
    contexts = [episodes[i].contexts[j] for i, j in zip(owners, placement.contexts, strict=True)]
    sizes = np.asarray([len(c) for c in contexts], np.int64)
    total = int(sizes.sum())
    starts = np.cumsum(sizes) - sizes
    positions = np.arange(total) - np.repeat(starts, sizes)
    where = np.repeat(at_row * length + at_column, sizes) + positions

    # Segments number the contexts of a row from 1, left to right.
    order = np.lexsort((at_column, at_row))
    first = np.searchsorted(at_row[order], np.arange(rows))
    segment = np.empty(len(contexts), np.int64)
    segment[order] = np.arange(len(contexts)) - first[at_row[order]] + 1

    def scatter(values: NDArray[np.generic], fill: int, dtype: type) -> NDArray[np.generic]:
        out: NDArray[np.generic] = np.full(rows * length, fill, dtype)
        out[where] = values
        return out.reshape(rows, length)

    def joined(name: str, dtype: type) -> NDArray[np.generic]:
        parts = [getattr(c, name) for c in contexts]
        return np.concatenate(parts) if parts else np.zeros(0, dtype)

    kinds = joined("kinds", np.uint8)
    sampled = kinds == Kind.ACTION
    return {
        "tokens": scatter(joined("tokens", np.int32), 0, np.int32),
        "positions": scatter(positions, 0, np.int32),
        "segment_ids": scatter(np.repeat(segment, sizes), 0, np.int32),
        "episode_ids": scatter(np.repeat(owners, sizes), padding_id, np.int32),
        "kind": scatter(kinds, Kind.PAD, np.uint8),
        "turn_ids": scatter(joined("turn_ids", np.int32), -1, np.int32),
        "behavior_logprobs": scatter(
            np.where(sampled, joined("logprobs", np.float32), 0.0), 0, np.float32
        ),
        "policy_versions": scatter(
            np.where(sampled, joined("versions", np.int32), -1), -1, np.int32
        ),
        "advantages": np.zeros((rows, length), np.float32),
    }


def _fill_episodes(
    episodes: Sequence[Episode],
    masked: Sequence[bool],
    num_episodes: int,
    max_turns: int,
    penalty: float,
) -> dict[str, Any]:
    rewards = np.zeros(num_episodes, np.float32)
    valid = np.zeros(num_episodes, np.bool_)
    truncated = np.zeros(num_episodes, np.bool_)
    group_ids = np.full(num_episodes, num_episodes, np.int32)
    versions = np.full(num_episodes, -1, np.int32)
    turn_rewards = np.zeros((num_episodes, max_turns), np.float32)
    groups: dict[str, int] = {}
    for index, episode in enumerate(episodes):
        group_ids[index] = groups.setdefault(episode.group_id, len(groups))
        truncated[index] = episode.truncated is not None
        if masked[index]:
            continue
        turns = _num_turns(episode)
        if turns > max_turns:
            raise ValueError(
                f"{_name(episode, index)} has {turns} turns: more than max_turns={max_turns}"
            )
        if not np.isfinite(episode.reward) or not np.all(np.isfinite(episode.turn_rewards)):
            raise ValueError(f"{_name(episode, index)} has a reward that is not finite")
        valid[index] = True
        rewards[index] = episode.reward - (penalty if truncated[index] else 0.0)
        turn_rewards[index, : len(episode.turn_rewards)] = episode.turn_rewards
        drawn = [c.versions[c.kinds == Kind.ACTION] for c in episode.contexts]
        versions[index] = min((int(v.min()) for v in drawn if v.size), default=-1)
    return {
        "rewards": rewards,
        "valid": valid,
        "truncated": truncated,
        "group_ids": group_ids,
        "versions": versions,
        "turn_rewards": turn_rewards,
    }


def _check_options(
    buckets: Sequence[int],
    rows: int | None,
    rows_multiple: int,
    truncation: str,
    truncation_penalty: float,
) -> None:
    if not buckets or min(buckets) < 1:
        raise ValueError(f"buckets must name at least one positive row length, got {buckets}")
    if rows is not None and rows % rows_multiple:
        raise ValueError(f"rows={rows} is not a multiple of rows_multiple={rows_multiple}")
    if truncation not in ("mask", "score", "penalise"):
        raise ValueError(f"truncation must be 'mask', 'score' or 'penalise', got {truncation!r}")
    if truncation_penalty and truncation != "penalise":
        raise ValueError("truncation_penalty is only used with truncation='penalise'")
    if truncation == "penalise" and truncation_penalty <= 0:
        raise ValueError("truncation='penalise' needs a truncation_penalty above 0")


def _check_context(context: Context, episode: Episode, index: int, longest: int) -> None:
    if len(context) > longest:
        raise ValueError(
            f"{_name(episode, index)} has a context of {len(context)} tokens: longer than the "
            f"largest bucket ({longest}); add a bucket or lower the context limit of the rollout"
        )
    if len(context) and context.kinds[0] == Kind.ACTION:
        raise ValueError(
            f"{_name(episode, index)} has a context that starts with a sampled token: "
            "nothing precedes it to predict it from"
        )
    if np.any(context.kinds == Kind.PAD):
        raise ValueError(f"{_name(episode, index)} has a context that holds PAD tokens")


def _name(episode: Episode, index: int) -> str:
    return f"episode {index} (task {episode.task_id!r}, group {episode.group_id!r})"


def _num_turns(episode: Episode) -> int:
    return max(episode.num_turns, len(episode.turn_rewards))
