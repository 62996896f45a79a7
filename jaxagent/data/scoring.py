"""Token sequences that are scored, not trained on, and where their scores belong.

A teacher reads an episode with more in its context; a gold answer is scored after each turn.
Both are sequences of their own, packed into rows of one fixed shape, and every token that
matters carries the index at which its log-probability is written back.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import flax.struct
import numpy as np
from numpy.typing import NDArray

from jaxagent.data.batch import Array
from jaxagent.data.kinds import Kind
from jaxagent.data.packing import Placement, first_fit
from jaxagent.episodes.episode import Context, Episode

Int = NDArray[np.int32]


@dataclass(frozen=True)
class Scored:
    """``tokens`` int32 [n] and ``targets`` int32 [n]: where each one's score goes, -1 nowhere."""

    tokens: Int
    targets: Int


@flax.struct.dataclass
class ScoreRows:
    """Packed :class:`Scored` sequences: int32 [R,T] each; ``targets`` is -1 on padding."""

    tokens: Array
    positions: Array
    segment_ids: Array
    targets: Array


@dataclass(frozen=True)
class Advice:
    """What a teacher is told about one episode of a batch, beyond what the policy saw.

    ``tokens`` go into the prompt; ``turns`` are those that the teacher teaches, None for all.
    """

    episode: int
    tokens: tuple[int, ...]
    turns: frozenset[int] | None = None


def teacher_sequences(
    episodes: Sequence[Episode],
    advice: Sequence[Advice],
    placement: Placement,
    tail: int = 0,
) -> list[Scored]:
    """The contexts of advised episodes with the advice inserted in their prompts.

    Every token but the inserted ones is the student's own, in the same order. Those that are
    scored, the ACTION tokens of the turns that are taught, have as target their flat index
    in the packed batch (see ``placement``). ``tail``: how many prompt tokens stay after the
    advice (the end of the user's turn in a chat template; see :func:`insertion_point`).

    Raises ValueError when an episode is advised twice.
    """
    if len({a.episode for a in advice}) != len(advice):
        raise ValueError("an episode is advised twice: one teacher gives one advice an episode")
    found = []
    for told in advice:
        episode = episodes[told.episode]
        for number, context in enumerate(episode.contexts):
            start = placement.start(told.episode, number)
            taught = context.kinds == Kind.ACTION
            if told.turns is not None:
                taught &= np.isin(context.turn_ids, list(told.turns))
            if start is None or not taught.any():
                continue
            at = insertion_point(episode, number, tail)
            targets = np.where(taught, start + np.arange(len(context)), -1)
            extra = np.asarray(told.tokens, np.int32)
            found.append(
                Scored(
                    np.insert(context.tokens, at, extra).astype(np.int32),
                    np.insert(targets, at, np.full(len(extra), -1)).astype(np.int32),
                )
            )
    return found


def insertion_point(episode: Episode, number: int, tail: int = 0) -> int:
    """Where advice goes in context ``number``: at the end of the task's prompt, before ``tail``.

    A rewritten history keeps the prompt at its start; where it does not, the advice comes
    after the first token.
    """
    first, context = episode.contexts[0], episode.contexts[number]
    at = _prompt_length(first) - tail
    if at < 1:
        raise ValueError(
            f"task {episode.task_id!r}: its prompt of {_prompt_length(first)} tokens has no room "
            f"for advice before the last {tail}"
        )
    same = len(context) >= at and np.array_equal(context.tokens[:at], first.tokens[:at])
    return at if same else 1


def boundary_sequences(
    episodes: Sequence[Episode],
    answers: Mapping[int, Sequence[int]],
    num_turns: int,
    closing: Sequence[int] = (),
) -> list[Scored]:
    """The answer of each episode in ``answers``, put before turn 0 and after each turn.

    The answer's tokens have the target ``episode * (num_turns + 1) + k``: k = 0 is what the
    prompt alone makes of it, k + 1 what is known after turn k. ``closing`` stands between a
    turn that nothing followed and the answer (the scaffolding that ends a turn).
    """
    found = []
    for index, answer in answers.items():
        episode = episodes[index]
        tail = np.asarray(answer, np.int32)
        for boundary, prefix in _boundaries(episode, num_turns):
            ended = boundary > 0 and prefix.kinds[-1] == Kind.ACTION
            between = np.asarray(closing if ended else (), np.int32)
            tokens = np.concatenate([prefix.tokens, between, tail]).astype(np.int32)
            targets = np.full(len(tokens), -1, np.int32)
            targets[len(tokens) - len(tail) :] = index * (num_turns + 1) + boundary
            found.append(Scored(tokens, targets))
    return found


def pack_scored(sequences: Sequence[Scored], *, rows: int, row_length: int) -> Iterator[ScoreRows]:
    """Packs into as many blocks of ``[rows, row_length]`` as it takes; none for none.

    One shape whatever the number of sequences, so one program scores them all. Raises
    ValueError when a sequence is longer than a row.
    """
    longest = max((len(s.tokens) for s in sequences), default=0)
    if longest > row_length:
        raise ValueError(
            f"a sequence of {longest} tokens does not fit rows of {row_length}: give the pass a "
            "larger row_length"
        )
    at_row, at_column = first_fit([len(s.tokens) for s in sequences], row_length)
    for first in range(0, int(at_row.max(initial=-1)) + 1, rows):
        block = empty_rows(rows, row_length)
        segments = np.zeros(rows, np.int32)
        for index in np.flatnonzero((at_row >= first) & (at_row < first + rows)):
            sequence, row = sequences[int(index)], at_row[index] - first
            where = slice(at_column[index], at_column[index] + len(sequence.tokens))
            segments[row] += 1
            block.tokens[row, where] = sequence.tokens
            block.positions[row, where] = np.arange(len(sequence.tokens))
            block.segment_ids[row, where] = segments[row]
            block.targets[row, where] = sequence.targets
        yield block


def empty_rows(rows: int, row_length: int) -> ScoreRows:
    """Rows of padding."""
    zeros = partial(np.zeros, (rows, row_length), np.int32)
    return ScoreRows(
        tokens=zeros(),
        positions=zeros(),
        segment_ids=zeros(),
        targets=np.full((rows, row_length), -1, np.int32),
    )


def _prompt_length(context: Context) -> int:
    """How many PROMPT tokens the context starts with."""
    others = np.flatnonzero(context.kinds != Kind.PROMPT)
    return int(others[0]) if others.size else len(context)


def _boundaries(episode: Episode, num_turns: int) -> Iterator[tuple[int, Context]]:
    """``(k, prefix)``: what the policy had seen before turn 0 (k = 0) and after turn k - 1."""
    first = episode.contexts[0]
    yield 0, _head(first, _prompt_length(first))
    for turn in range(min(episode.num_turns, num_turns)):
        for context in episode.contexts:
            inside = context.turn_ids == turn
            if (inside & (context.kinds == Kind.ACTION)).any():
                yield turn + 1, _head(context, int(np.flatnonzero(inside)[-1]) + 1)
                break


def _head(context: Context, length: int) -> Context:
    return Context(
        context.tokens[:length],
        context.kinds[:length],
        context.turn_ids[:length],
        context.logprobs[:length],
        context.versions[:length],
    )
