"""Teacher sequences line up with the student's tokens, whatever episodes, advice and packing."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.data.kinds import Kind
from jaxagent.data.packing import pack, place
from jaxagent.data.scoring import (
    Advice,
    boundary_sequences,
    insertion_point,
    pack_scored,
    teacher_sequences,
)
from jaxagent.data.synthetic import random_episodes
from jaxagent.episodes.episode import Episode

BUCKETS = (96,)
ADVICE_TOKEN = 1000  # no episode has it: inserted tokens can be told apart


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Episode], list[Advice], str]:
    episodes = random_episodes(
        draw(st.integers(0, 1000)),
        groups=draw(st.integers(1, 3)),
        max_contexts=draw(st.integers(1, 3)),
        invalid=0.2,
        truncated=0.3,
    )
    chosen = draw(st.lists(st.integers(0, len(episodes) - 1), unique=True))
    advice = [
        Advice(
            index,
            (ADVICE_TOKEN,) * draw(st.integers(0, 9)),
            draw(st.none() | st.frozensets(st.integers(0, 6))),
        )
        for index in chosen
    ]
    return episodes, advice, draw(st.sampled_from(["score", "mask"]))


@settings(max_examples=80, deadline=None)
@given(cases())
def test_every_target_is_the_students_own_token(
    case: tuple[list[Episode], list[Advice], str],
) -> None:
    episodes, advice, truncation = case
    placement = place(episodes, buckets=BUCKETS, truncation=truncation)  # type: ignore[arg-type]
    batch = pack(episodes, buckets=BUCKETS, truncation=truncation)  # type: ignore[arg-type]
    sequences = teacher_sequences(episodes, advice, placement)
    tokens, kind = batch.tokens.reshape(-1), batch.kind.reshape(-1)
    turns, owner = batch.turn_ids.reshape(-1), batch.episode_ids.reshape(-1)
    hit: list[int] = []
    for sequence in sequences:
        scored = sequence.targets >= 0
        at = sequence.targets[scored]
        np.testing.assert_array_equal(sequence.tokens[scored], tokens[at])
        assert (kind[at] == Kind.ACTION).all()
        hit += at.tolist()
        # Without the advice it is the student's context, from its first token on.
        inserted = sequence.tokens == ADVICE_TOKEN
        own = sequence.tokens[~inserted]
        first = int(np.flatnonzero(~inserted & scored)[0])
        start = int(sequence.targets[first]) - int((~inserted[:first]).sum())
        np.testing.assert_array_equal(own, tokens[start : start + len(own)])
        # All of it comes before anything that is scored.
        assert not inserted[first:].any()
    # Each taught token exactly once, and no other.
    told = {a.episode: a for a in advice}
    wanted = [
        i
        for i in range(len(tokens))
        if kind[i] == Kind.ACTION
        and owner[i] in told
        and (told[owner[i]].turns is None or turns[i] in told[owner[i]].turns)  # type: ignore[operator]
    ]
    assert sorted(hit) == wanted


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(1, 3))
def test_packing_loses_nothing(case: tuple[list[Episode], list[Advice], str], rows: int) -> None:
    episodes, advice, _ = case
    sequences = teacher_sequences(episodes, advice, place(episodes, buckets=BUCKETS))
    blocks = list(pack_scored(sequences, rows=rows, row_length=128))
    assert all(block.tokens.shape == (rows, 128) for block in blocks)
    found = sorted(
        (tuple(block.tokens[row, where]), tuple(block.targets[row, where]))
        for block in blocks
        for row in range(rows)
        for segment in range(1, int(block.segment_ids[row].max(initial=0)) + 1)
        for where in [np.flatnonzero(block.segment_ids[row] == segment)]
    )
    assert found == sorted((tuple(s.tokens), tuple(s.targets)) for s in sequences)
    for block in blocks:
        assert (block.targets[block.segment_ids == 0] == -1).all()


def test_a_prompt_tail_stays_behind_the_advice() -> None:
    (episode,) = random_episodes(3, groups=1, group_size=1)
    context = episode.contexts[0]
    prompt = int((context.kinds == Kind.PROMPT).sum())
    assert insertion_point(episode, 0, tail=0) == prompt
    with pytest.raises(ValueError, match="no room"):
        insertion_point(episode, 0, tail=prompt)


def test_a_rewritten_prompt_gets_the_advice_after_its_first_token() -> None:
    one, other = random_episodes(3, groups=1, group_size=2)
    episode = replace(one, contexts=(one.contexts[0], other.contexts[0]))
    assert insertion_point(episode, 1) == 1


def test_one_advice_an_episode() -> None:
    episodes = random_episodes(3, groups=1, group_size=1)
    twice = [Advice(0, (1,)), Advice(0, (2,))]
    with pytest.raises(ValueError, match="advised twice"):
        teacher_sequences(episodes, twice, place(episodes, buckets=BUCKETS))


def test_too_long_a_sequence_is_named() -> None:
    episodes = random_episodes(3, groups=1, group_size=1)
    sequences = teacher_sequences(
        episodes, [Advice(0, (1,) * 200)], place(episodes, buckets=BUCKETS)
    )
    with pytest.raises(ValueError, match="larger row_length"):
        next(pack_scored(sequences, rows=1, row_length=64))


def test_answers_stand_at_every_boundary() -> None:
    (episode,) = random_episodes(5, groups=1, group_size=1, max_turns=3)
    context, turns = episode.contexts[0], episode.num_turns
    answer, closing = [7, 8], [9]
    found = boundary_sequences([episode], {0: answer}, num_turns=4, closing=closing)
    assert len(found) == turns + 1
    for k, sequence in enumerate(found):
        assert sequence.tokens[-2:].tolist() == answer
        assert sequence.targets[-2:].tolist() == [k, k] and (sequence.targets[:-2] == -1).all()
        inside = (context.turn_ids < k) if k else (context.kinds == Kind.PROMPT)
        before = context.tokens[inside]
        ended = k > 0 and context.kinds[inside][-1] == Kind.ACTION
        np.testing.assert_array_equal(sequence.tokens[:-2], [*before, *(closing if ended else [])])
