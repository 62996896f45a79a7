"""The policy's own analysis of a finished episode, written by the engine itself.

The engine goes on from the episode's exact tokens: the request follows the transcript, and
what it writes is parsed. It runs when the episode's group is done, beside the sampling of
other groups; nothing of it enters the episode's tokens.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jaxagent.data.hindsight import Skills, UnparsableSkills, parse_skills
from jaxagent.episodes.engine import Engine
from jaxagent.episodes.episode import Episode
from jaxagent.episodes.groups import Group
from jaxagent.episodes.history import context_key
from jaxagent.episodes.loop import AfterGroup
from jaxagent.episodes.protocol import ActionProtocol

REQUEST = (
    '\nThe attempt is over; its score is {reward:g}. Write {{"episode": "<what to do next time>", '
    '"steps": [{{"turn": <number from 0>, "skill": "<what to do in this turn>"}}]}}\n'
)
# Far above any episode's number of contexts: the seed of the analysis is of its own.
_KEY = 1 << 20


@dataclass(frozen=True)
class Analysis:
    """How an episode is analysed.

    Attributes:
      max_tokens: the longest analysis.
      max_context: tokens that the engine can hold: transcript, request and analysis.
      request: what is asked; ``{reward}`` stands for the episode's reward.
      parse: ``(text, number of turns) -> Skills``; raises UnparsableSkills.
    """

    max_tokens: int
    max_context: int
    request: str = REQUEST
    parse: Callable[[str, int], Skills] = parse_skills


def self_written_skills(
    engine: Engine, protocol: ActionProtocol, sampling: Any, analysis: Analysis
) -> AfterGroup:
    """Writes ``info["skills"]`` of every valid episode, or ``info["skills_error"]``, the reason.

    For ``EpisodeLoop(after_group=...)``. ``sampling``: as for the episodes; its limit and stop
    tokens are set here. A transcript too long for ``max_context`` has no skills either.
    Source: OPID, SEED (the policy analyses its own trajectories).
    """

    async def annotate(group: Group) -> Group:
        episodes = await asyncio.gather(*map(one, group.episodes))
        return replace(group, episodes=tuple(episodes))

    async def one(episode: Episode) -> Episode:
        if not episode.valid or not episode.contexts:
            return episode
        try:
            found: dict[str, Any] = {"skills": await write(episode)}
        except UnparsableSkills as error:
            found = {"skills_error": str(error)}
        return replace(episode, info={**episode.info, **found})

    async def write(episode: Episode) -> Skills:
        request = protocol.tokenizer.encode(analysis.request.format(reward=episode.reward))
        tokens = [*episode.contexts[-1].tokens.tolist(), *request]
        if len(tokens) + analysis.max_tokens > analysis.max_context:
            raise UnparsableSkills("the transcript is too long to be analysed")
        session = engine.open_session(context_key(int(episode.info.get("seed", 0)), _KEY))
        try:
            settings = replace(
                sampling,
                max_new_tokens=analysis.max_tokens,
                stop_tokens=protocol.stop_tokens,
                stop_strings=protocol.stop_strings,
            )
            written = await asyncio.wrap_future(session.generate(tokens, settings))
        finally:
            session.close()
        kept = [int(t) for t in written.tokens if int(t) not in protocol.stop_tokens]
        return analysis.parse(protocol.tokenizer.decode(kept), episode.num_turns)

    return annotate


def plain_skills(text: str, num_turns: int) -> Skills:
    """Any text as the lesson, for policies too small to write JSON; lines ``3: ...`` are of turn 3.

    Raises UnparsableSkills when nothing readable is left.
    """
    lesson: list[str] = []
    steps: dict[int, str] = {}
    for line in text.splitlines():
        number, colon, rest = line.partition(":")
        if colon and number.strip().isdecimal() and int(number) < num_turns and rest.strip():
            steps.setdefault(int(number), rest.strip())
        elif line.strip():
            lesson.append(line.strip())
    if not any(c.isalnum() for line in lesson for c in line):
        raise UnparsableSkills("nothing readable")
    return Skills(" ".join(lesson), tuple(sorted(steps.items())))
