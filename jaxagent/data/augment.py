"""Sequences of their own that a loss is trained on beside the episodes.

They are packed with the batch, so the one forward pass, micro-batches and meshes serve them
as well. What they are to a loss is said token by token by marks, which become scores; to
everything else they do not exist: a forecast is a TEMPLATE context of its episode, a
demonstration is an episode in a group of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxagent.data.kinds import Kind
from jaxagent.data.packing import Placement
from jaxagent.episodes.episode import Context, Episode

Encode = Callable[[str], Sequence[int]]
# (episode, context) -> float32 [n], one value a token of the context.
Marks = Mapping[tuple[int, int], NDArray[np.float32]]
Gate = Literal["wins", "mixed", "all"]


@dataclass(frozen=True)
class Augmented:
    """The episodes to pack (the given ones come first, in order) and marks by score name."""

    episodes: tuple[Episode, ...]
    marks: Mapping[str, Marks]


class Augment(NamedTuple):
    """``fn(episodes) -> Augmented`` and the ``scores`` it marks;.

    ``more``: at most how many episodes it adds to a batch of n, as a multiple of n.
    """

    scores: frozenset[str]
    fn: Callable[[Sequence[Episode]], Augmented]
    more: int = 0


def marked_score(placement: Placement, marks: Marks, shape: tuple[int, int]) -> NDArray[np.float32]:
    """[R,T] float32: the marks where :func:`jaxagent.data.packing.pack` put their tokens."""
    flat = np.zeros(shape[0] * shape[1], np.float32)
    for (episode, context), values in marks.items():
        start = placement.start(episode, context)
        if start is not None:
            flat[start : start + len(values)] = values
    return flat.reshape(shape)


def forecast_contexts(
    encode: Encode,
    *,
    max_tokens: int,
    horizon: int = 3,
    gate: Gate = "wins",
    success: float = 0.5,
    prompt: str = "\nThe next {count} actions:",
    between: str = "\n",
    skip: Callable[[Episode, int], bool] | None = None,
    group_norm: bool = True,
) -> Augment:
    """At every turn, what the policy went on to do: a context to forecast it from (CoPE).

    The history up to the turn, a question for the next ``horizon`` actions, and the realised
    ones from this turn on as targets; the end of the episode clamps their number. Only the
    targets are marked, in the score ``"forecast"``, with the weight of their episode (see
    :func:`jaxagent.losses.forecast`). ``gate``: episodes whose reward is above ``success``
    (``"wins"``), those of groups that did not all win or all fail (``"mixed"``: the wins of
    such groups), or ``"all"``. ``skip(episode, turn)`` leaves out actions without effect,
    as targets and as starting points. ``group_norm`` weighs an episode by 1 over the number
    of its group's episodes that are kept, brought to a mean of 1 over the samples. A history
    that leaves no room in ``max_tokens`` is cut on the left, never the targets: those of a
    sample longer than that drop the sample.

    Source: CoPE, ``action_forecast.py``: horizon 3, wins only, 4,096 tokens, a weight of 0.01.
    """
    if horizon < 1:
        raise ValueError(f"horizon must be at least 1, got {horizon}")
    if gate not in ("wins", "mixed", "all"):
        raise ValueError(f"gate must be 'wins', 'mixed' or 'all', got {gate!r}")

    def fn(episodes: Sequence[Episode]) -> Augmented:
        kept = _gated(episodes, gate, success)
        samples: list[tuple[int, Context, NDArray[np.bool_]]] = []
        for index in kept:
            samples += [
                (index, *sample)
                for sample in _forecasts(
                    episodes[index], encode, horizon, prompt, between, max_tokens, skip
                )
            ]
        weights = _group_weights(episodes, samples) if group_norm else np.ones(len(samples))
        extended, marks = list(episodes), {}
        for (index, context, target), weight in zip(samples, weights, strict=True):
            number = len(extended[index].contexts)
            extended[index] = replace(
                extended[index], contexts=(*extended[index].contexts, context)
            )
            marks[index, number] = np.where(target, weight, 0.0).astype(np.float32)
        return Augmented(tuple(extended), {"forecast": marks})

    return Augment(frozenset({"forecast"}), fn)


def verified_demonstrations(
    demonstration: Callable[[Episode], Episode | None], *, success: float = 1.0
) -> Augment:
    """A teacher's verified solution beside a failed episode, up to where they part (OVCSD).

    ``demonstration(episode)`` is a rollout of the teacher on the same task; one whose reward
    is below ``success`` is not verified and counts for nothing. The two are compared turn by
    turn: at the first turn whose actions differ after equal histories, the score
    ``"preference"`` marks the teacher's action as preferred to the student's, and
    ``"suffix"`` marks all that the teacher did from there on. Each demonstration is an
    episode in a group of its own, so it has no advantage.

    Derived from the abstract of OVCSD.
    """

    def fn(episodes: Sequence[Episode]) -> Augmented:
        extended = list(episodes)
        preference: dict[tuple[int, int], NDArray[np.float32]] = {}
        suffix: dict[tuple[int, int], NDArray[np.float32]] = {}
        pairs = 0
        for index, episode in enumerate(episodes):
            if not episode.valid or episode.reward >= success or len(episode.contexts) != 1:
                continue
            shown = demonstration(episode)
            if shown is None or not shown.valid or shown.reward < success:
                continue
            turn = divergence_turn(shown, episode)
            if turn is None or len(shown.contexts) != 1:
                continue
            pairs += 1
            added = len(extended)
            extended.append(replace(shown, group_id=f"{episode.group_id}/demonstration/{index}"))
            mine, theirs = episode.contexts[0], shown.contexts[0]
            preference[index, 0] = -pairs * _acted(mine, turn, turn + 1)
            preference[added, 0] = pairs * _acted(theirs, turn, turn + 1)
            suffix[added, 0] = _acted(theirs, turn, shown.num_turns)
        return Augmented(tuple(extended), {"preference": preference, "suffix": suffix})

    return Augment(frozenset({"preference", "suffix"}), fn, more=1)


def divergence_turn(one: Episode, other: Episode) -> int | None:
    """The first turn whose sampled tokens differ after equal histories; None without one.

    Histories are compared token by token, observations and scaffolding included: a turn
    counts only if both were in the same state before it.
    """
    a, b = one.contexts[0], other.contexts[0]
    for turn in range(min(one.num_turns, other.num_turns)):
        acted = [np.flatnonzero(_acted(c, turn, turn + 1)) for c in (a, b)]
        if not acted[0].size or not acted[1].size:
            return None
        starts = [int(found[0]) for found in acted]
        if not np.array_equal(a.tokens[: starts[0]], b.tokens[: starts[1]]):
            return None
        if not np.array_equal(a.tokens[acted[0]], b.tokens[acted[1]]):
            return turn
    return None


def _acted(context: Context, first: int, last: int) -> NDArray[np.float32]:
    """1 on the ACTION tokens of turns ``first`` to ``last`` (excluded)."""
    inside = (context.turn_ids >= first) & (context.turn_ids < last)
    return (inside & (context.kinds == Kind.ACTION)).astype(np.float32)


def _gated(episodes: Sequence[Episode], gate: Gate, success: float) -> list[int]:
    valid = [i for i, episode in enumerate(episodes) if episode.valid]
    if gate == "all":
        return valid
    wins = [i for i in valid if episodes[i].reward > success]
    if gate == "wins":
        return wins
    lost = {episodes[i].group_id for i in valid if episodes[i].reward <= success}
    return [i for i in wins if episodes[i].group_id in lost]


def _forecasts(
    episode: Episode,
    encode: Encode,
    horizon: int,
    prompt: str,
    between: str,
    max_tokens: int,
    skip: Callable[[Episode, int], bool] | None,
) -> list[tuple[Context, NDArray[np.bool_]]]:
    turns = [turn for turn in range(episode.num_turns) if skip is None or not skip(episode, turn)]
    found = []
    for at, turn in enumerate(turns):
        ahead = [a for t in turns[at : at + horizon] if (a := _action(episode, t)).size]
        history = _history(episode, turn)
        if not ahead or history is None:
            continue
        question = np.asarray(encode(prompt.format(count=len(ahead))), np.int32)
        gap = np.asarray(encode(between), np.int32)
        parts, targets = [question], [np.zeros(len(question), np.bool_)]
        for action in ahead:
            parts += [gap, action]
            targets += [np.zeros(len(gap), np.bool_), np.ones(len(action), np.bool_)]
        asked, target = np.concatenate(parts), np.concatenate(targets)
        room = max_tokens - len(asked)
        if room < 1:
            continue
        tokens = np.concatenate([history[-room:], asked]).astype(np.int32)
        target = np.concatenate([np.zeros(len(tokens) - len(asked), np.bool_), target])
        found.append((_template(tokens), target))
    return found


def _action(episode: Episode, turn: int) -> NDArray[np.int32]:
    parts = [c.tokens[(c.turn_ids == turn) & (c.kinds == Kind.ACTION)] for c in episode.contexts]
    return np.concatenate(parts).astype(np.int32)


def _history(episode: Episode, turn: int) -> NDArray[np.int32] | None:
    """All that the policy had seen when it began ``turn``."""
    for context in episode.contexts:
        acted = np.flatnonzero(_acted(context, turn, turn + 1))
        if acted.size:
            return context.tokens[: acted[0]]
    return None


def _template(tokens: NDArray[np.int32]) -> Context:
    size = len(tokens)
    return Context(
        tokens=tokens,
        kinds=np.full(size, Kind.TEMPLATE, np.uint8),
        turn_ids=np.full(size, -1, np.int32),
        logprobs=np.zeros(size, np.float32),
        versions=np.full(size, -1, np.int32),
    )


def _group_weights(
    episodes: Sequence[Episode], samples: Sequence[tuple[int, Context, NDArray[np.bool_]]]
) -> NDArray[np.float64]:
    """1 over the kept episodes of the sample's group, then a mean of 1 over all samples."""
    members: dict[str, set[int]] = {}
    for index, _, _ in samples:
        members.setdefault(episodes[index].group_id, set()).add(index)
    weights = np.array([1 / len(members[episodes[index].group_id]) for index, _, _ in samples])
    return weights / weights.mean() if weights.size else weights
