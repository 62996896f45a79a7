"""Who is told what about an episode after the fact."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxagent.data.hindsight import (
    Skills,
    UnparsableSkills,
    actions,
    best_sibling,
    group_summary,
    outcome_text,
    parse_skills,
    skills,
    told,
)
from jaxagent.data.kinds import Kind
from jaxagent.episodes.episode import Context, Episode


def encode(text: str) -> list[int]:
    return [ord(c) + 1000 for c in text]


def episode(action: int, reward: float, turns: int = 1, group: str = "g", valid: bool = True):  # type: ignore[no-untyped-def]
    kinds = [Kind.PROMPT] + [Kind.ACTION, Kind.OBSERVATION] * turns
    ids = [-1] + [t for turn in range(turns) for t in (turn, turn)]
    size = len(kinds)
    context = Context(
        np.array([1] + [action, 5] * turns, np.int32),
        np.array(kinds, np.uint8),
        np.array(ids, np.int32),
        np.zeros(size, np.float32),
        np.zeros(size, np.int32),
    )
    return Episode("task", group, (context,), reward, valid=valid)


GROUP: list[Episode] = [
    episode(11, 0.0, turns=2),
    episode(12, 1.0, turns=3),
    episode(13, 1.0, turns=1),
    episode(14, 0.0, valid=False),
    episode(15, 1.0, group="other"),
]


def test_a_summary_tells_the_valid_siblings_and_how_they_ended() -> None:
    found = {a.episode: a for a in group_summary(encode)(GROUP)}
    # Alone in its group, or failed by its environment: nothing to tell.
    assert sorted(found) == [0, 1, 2]
    solved, failed = encode("\nsolved: "), encode("\nfailed: ")
    assert found[0].tokens == (*solved, 12, 12, 12, *solved, 13)
    assert found[2].tokens == (*failed, 11, 11, *solved, 12, 12, 12)
    assert found[0].turns is None
    short = group_summary(encode, max_tokens=10)(GROUP)
    assert all(len(a.tokens) <= 10 for a in short)


def test_the_first_successful_sibling_or_the_own_solution() -> None:
    solved = encode("\nsolved: ")
    found = {a.episode: a.tokens for a in best_sibling(encode)(GROUP)}
    assert found == {0: (*solved, 12, 12, 12), 1: (*solved, 13), 2: (*solved, 12, 12, 12)}
    own = {a.episode: a.tokens for a in best_sibling(encode, own=True)(GROUP)}
    assert own[1] == (*solved, 12, 12, 12) and own[4] == (*solved, 15)


def test_a_better_sibling_is_shorter_or_the_only_success() -> None:
    found = {a.episode: a.tokens for a in best_sibling(encode, rule="better")(GROUP)}
    # The failed one and the longer success learn from the shortest; that one from nobody.
    assert found == {i: (*encode("\nsolved: "), 13) for i in (0, 1)}
    assert best_sibling(encode, rule="better")([GROUP[0], episode(16, 0.0)]) == []


def test_privileged_text() -> None:
    found = told(encode, lambda e: outcome_text(e) if e.reward else None)(GROUP)
    assert [a.episode for a in found] == [1, 2, 4]
    assert found[0].tokens == tuple(encode("\nThis attempt ends with a score of 1."))


def test_skills_teach_the_episode_or_their_turns() -> None:
    written = Skills("look first", ((1, "use grep"),))
    group = [replace(GROUP[0], info={"skills": written}), GROUP[1]]
    (whole,) = skills(encode, "episode")(group)
    assert whole.tokens == tuple(encode("\nlook first")) and whole.turns is None
    (step,) = skills(encode, "step")(group)
    assert step.tokens == tuple(encode("\nturn 2: use grep")) and step.turns == {1}
    only = [replace(GROUP[0], info={"skills": Skills("look first")})]
    assert skills(encode, "step")(only) == []


def test_skills_are_parsed() -> None:
    text = 'Well: {"episode": " a ", "steps": [{"turn": 1, "skill": "b"}]} done'
    assert parse_skills(text, num_turns=2) == Skills("a", ((1, "b"),))
    assert parse_skills('{"episode": "a"}', num_turns=0) == Skills("a")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no object", "no JSON object"),
        ("}{", "no JSON object"),
        ("{'episode': 'a'}", "not JSON"),
        ('{"episode": "  "}', "'episode'"),
        ('{"steps": []}', "'episode'"),
        ('{"episode": "a", "steps": 3}', "'steps'"),
        ('{"episode": "a", "steps": [{"turn": 2, "skill": "b"}]}', "'turn'"),
        ('{"episode": "a", "steps": [{"turn": true, "skill": "b"}]}', "'turn'"),
        ('{"episode": "a", "steps": [{"turn": 0}]}', "'skill'"),
        (
            '{"episode": "a", "steps": [{"turn": 0, "skill": "b"}, {"turn": 0, "skill": "c"}]}',
            "each once",
        ),
    ],
)
def test_what_does_not_parse_is_said(text: str, reason: str) -> None:
    with pytest.raises(UnparsableSkills, match=reason):
        parse_skills(text, num_turns=2)


@given(st.text())
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        found = parse_skills(text, num_turns=3)
    except UnparsableSkills:
        return
    assert found.episode


def test_misuse_is_named_when_it_is_built() -> None:
    with pytest.raises(ValueError, match="rule"):
        best_sibling(encode, rule="best")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="own"):
        best_sibling(encode, rule="better", own=True)
    with pytest.raises(ValueError, match="level"):
        skills(encode, "turn")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_tokens"):
        group_summary(encode, max_tokens=0)


def test_actions_are_the_sampled_tokens() -> None:
    assert actions(GROUP[1]) == [12, 12, 12]
