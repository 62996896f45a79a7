"""What can be told in hindsight about an episode: siblings, outcome, solution, own skills.

A builder is a pure function ``episodes -> advice``: for each episode of the batch it can say
something about, the tokens that a teacher reads in addition (see ``data.scoring``). No advice
means no teacher for that episode. Siblings are the other valid episodes of the group, quoted
token for token; other text is tokenised anew, since no policy sampled it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxagent.data.kinds import Kind
from jaxagent.data.scoring import Advice
from jaxagent.episodes.episode import Episode

Builder = Callable[[Sequence[Episode]], list[Advice]]
Encode = Callable[[str], Sequence[int]]


def group_summary(encode: Encode, *, success: float = 1.0, max_tokens: int = 512) -> Builder:
    """All siblings' actions with how they ended, for every episode that has a sibling.

    SD-Search's hindsight block: the queries of the group and their outcomes. Each sibling is
    ``"solved: "`` or ``"failed: "`` (reward below ``success``) and its sampled tokens.
    """
    _check(max_tokens)

    def build(episodes: Sequence[Episode]) -> list[Advice]:
        found = []
        for index, others in _siblings(episodes):
            told: list[int] = []
            for other in others:
                verdict = "solved" if episodes[other].reward >= success else "failed"
                told += [*encode(f"\n{verdict}: "), *actions(episodes[other])]
            if told:
                found.append(Advice(index, tuple(told[:max_tokens])))
        return found

    return build


def best_sibling(
    encode: Encode,
    *,
    success: float = 1.0,
    rule: Literal["any", "better"] = "any",
    own: bool = False,
    max_tokens: int = 512,
) -> Builder:
    """The solution of a sibling that succeeded (reward at least ``success``).

    ``rule="any"`` (SDPO): the first one of the group; with ``own`` the episode's own solution
    counts as well. ``rule="better"`` (Search-E1, derived): the one with the fewest turns, and
    only where the episode failed or took more turns than it.
    """
    _check(max_tokens)
    if rule not in ("any", "better"):
        raise ValueError(f"rule must be 'any' or 'better', got {rule!r}")
    if own and rule == "better":
        raise ValueError("own is for rule='any': no episode is better than itself")

    def build(episodes: Sequence[Episode]) -> list[Advice]:
        found = []
        for index, others in _siblings(episodes):
            candidates = sorted([*others, index]) if own else list(others)
            solved = [i for i in candidates if episodes[i].reward >= success]
            if rule == "better":
                mine = episodes[index]
                turns = mine.num_turns if mine.reward >= success else None
                solved = [i for i in solved if turns is None or episodes[i].num_turns < turns]
                solved.sort(key=lambda i: episodes[i].num_turns)
            if solved:
                told = [*encode("\nsolved: "), *actions(episodes[solved[0]])]
                found.append(Advice(index, tuple(told[:max_tokens])))
        return found

    return build


def told(
    encode: Encode, text: Callable[[Episode], str | None], *, max_tokens: int = 512
) -> Builder:
    """Whatever ``text(episode)`` says; None or "" for no advice.

    For what is known after the fact: a reference solution, the verifier's report, the
    outcome (see :func:`outcome_text`).
    """
    _check(max_tokens)

    def build(episodes: Sequence[Episode]) -> list[Advice]:
        texts = [text(episode) if episode.valid else None for episode in episodes]
        return [
            Advice(index, tuple(encode(said)[:max_tokens]))
            for index, said in enumerate(texts)
            if said
        ]

    return build


def outcome_text(episode: Episode) -> str:
    """One line on how the episode ended, for :func:`told`."""
    return f"\nThis attempt ends with a score of {episode.reward:g}."


@dataclass(frozen=True)
class Skills:
    """What a policy wrote about its own finished episode: a lesson, and lessons for turns."""

    episode: str
    steps: tuple[tuple[int, str], ...] = ()


class UnparsableSkills(ValueError):
    """A self-written analysis does not have the form that was asked for."""


def parse_skills(text: str, num_turns: int, max_steps: int = 5) -> Skills:
    """``{"episode": "...", "steps": [{"turn": 0, "skill": "..."}, ...]}``, text around it allowed.

    Raises UnparsableSkills naming what is wrong: no object, no lesson, a turn that does not
    exist or occurs twice, more than ``max_steps`` steps.
    """
    start, end = text.find("{"), text.rfind("}")
    if start < 0 or end < start:
        raise UnparsableSkills("no JSON object")
    try:
        found: Any = json.loads(text[start : end + 1])
    except (json.JSONDecodeError, RecursionError) as error:
        raise UnparsableSkills(f"not JSON: {error}") from None
    lesson = found.get("episode") if isinstance(found, dict) else None
    if not isinstance(lesson, str) or not lesson.strip():
        raise UnparsableSkills("'episode' must be a text that is not empty")
    steps = found.get("steps", [])
    if not isinstance(steps, list) or len(steps) > max_steps:
        raise UnparsableSkills(f"'steps' must be a list of at most {max_steps}")
    parsed: dict[int, str] = {}
    for step in steps:
        turn = step.get("turn") if isinstance(step, dict) else None
        skill = step.get("skill") if isinstance(step, dict) else None
        if type(turn) is not int or not 0 <= turn < num_turns or turn in parsed:
            raise UnparsableSkills(f"'turn' must be a turn of 0..{num_turns - 1}, each once")
        if not isinstance(skill, str) or not skill.strip():
            raise UnparsableSkills(f"'skill' of turn {turn} must be a text that is not empty")
        parsed[turn] = skill.strip()
    return Skills(lesson.strip(), tuple(sorted(parsed.items())))


def skills(
    encode: Encode, level: Literal["episode", "step"] = "episode", *, max_tokens: int = 256
) -> Builder:
    """Self-written skills, ``episode.info["skills"]`` (:class:`Skills`), as advice (OPID, SEED).

    ``"episode"`` teaches every turn with the lesson of the whole. ``"step"`` teaches only the
    turns that have a lesson of their own; the teacher reads all of those, marked by turn.
    An episode whose analysis did not parse has no such entry and no teacher.
    """
    _check(max_tokens)
    if level not in ("episode", "step"):
        raise ValueError(f"level must be 'episode' or 'step', got {level!r}")

    def build(episodes: Sequence[Episode]) -> list[Advice]:
        found = []
        for index, episode in enumerate(episodes):
            written = episode.info.get("skills") if episode.valid else None
            if not isinstance(written, Skills):
                continue
            if level == "episode":
                found.append(Advice(index, tuple(encode(f"\n{written.episode}")[:max_tokens])))
            elif written.steps:
                text = "".join(f"\nturn {turn + 1}: {skill}" for turn, skill in written.steps)
                turns = frozenset(turn for turn, _ in written.steps)
                found.append(Advice(index, tuple(encode(text)[:max_tokens]), turns))
        return found

    return build


def actions(episode: Episode) -> list[int]:
    """The sampled tokens of all turns, one after the other."""
    found: list[int] = []
    for context in episode.contexts:
        found += context.tokens[context.kinds == Kind.ACTION].tolist()
    return found


def _siblings(episodes: Sequence[Episode]) -> list[tuple[int, list[int]]]:
    """For each valid episode, the other valid episodes of its group."""
    groups: dict[str, list[int]] = {}
    for index, episode in enumerate(episodes):
        if episode.valid:
            groups.setdefault(episode.group_id, []).append(index)
    return [
        (index, [other for other in groups[episode.group_id] if other != index])
        for index, episode in enumerate(episodes)
        if episode.valid
    ]


def _check(max_tokens: int) -> None:
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
