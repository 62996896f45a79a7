"""What is done with a finished group before it is delivered: filters, notes, own skills."""

import asyncio
from dataclasses import replace

import pytest

from jaxagent.data.hindsight import Skills, UnparsableSkills
from jaxagent.data.kinds import Kind
from jaxagent.episodes.groups import Group
from jaxagent.episodes.loop import MAX_FILTERED_BATCHES, AfterGroup, EpisodeLoop, LoopConfig
from jaxagent.episodes.rollout import Limits
from jaxagent.episodes.skills import Analysis, plain_skills, self_written_skills
from tests.episodes.fakes import (
    DONE,
    PROTOCOL,
    TOKENIZER,
    FakeEngine,
    Sampling,
    ToyTask,
    Worlds,
    keyed_policy,
)


class Endless:
    def __getitem__(self, index: int) -> ToyTask:
        return ToyTask(f"task{index}", 1 + index % 2)


def collect(after_group: AfterGroup, engine: FakeEngine | None = None, **config):  # type: ignore[no-untyped-def]
    async def run():  # type: ignore[no-untyped-def]
        loop = EpisodeLoop(
            engine or FakeEngine(keyed_policy),
            Endless(),
            Worlds(),
            PROTOCOL,
            Sampling(),
            LoopConfig(group_size=2, groups_per_batch=3, gather_seconds=0.0, **config),
            Limits(max_turns=4),
            after_group=after_group,
        )
        async with loop:
            return await loop.collect()

    return asyncio.run(run())


def test_groups_that_are_filtered_out_are_replaced_and_counted() -> None:
    async def even(group: Group) -> Group | None:
        return None if group.index % 2 else group

    found = collect(even)
    assert [group.index for group in found.groups] == [0, 2, 4]
    assert found.counts["groups/filtered"] == 2 and found.counts["groups/started"] == 5


def test_a_filter_that_nothing_passes_ends_in_groups_as_they_are() -> None:
    async def never(group: Group) -> Group | None:
        return None

    found = collect(never)
    assert len(found.groups) == 3
    assert found.counts["groups/filtered"] >= MAX_FILTERED_BATCHES * 3


def test_a_failing_hook_costs_no_episode(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(group: Group) -> Group | None:
        raise RuntimeError("no judge")

    found = collect(broken)
    assert all(e.valid for e in found.episodes) and len(found.groups) == 3
    assert found.counts["groups/annotation_failed"] == 3
    assert "no judge" in caplog.text


def writer(text: str):  # type: ignore[no-untyped-def]
    """A policy that answers the request for an analysis with ``text``."""

    def policy(key: int, context: list[int], turn: int) -> list[int]:
        if "The attempt is over" in TOKENIZER.decode(context):
            return [*TOKENIZER.encode(text), DONE]
        return keyed_policy(key, context, turn)

    return policy


def annotated(text: str, analysis: Analysis | None = None):  # type: ignore[no-untyped-def]
    engine = FakeEngine(writer(text))
    analysis = analysis or Analysis(max_tokens=200, max_context=4096)
    return collect(self_written_skills(engine, PROTOCOL, Sampling(), analysis), engine)


def test_the_policy_writes_its_own_skills_and_they_leave_no_token() -> None:
    found = annotated('{"episode": "look", "steps": [{"turn": 0, "skill": "list"}]}')
    plain = collect(lambda group: asyncio.sleep(0, group))
    assert all(e.info["skills"] == Skills("look", ((0, "list"),)) for e in found.episodes)
    for one, other in zip(found.episodes, plain.episodes, strict=True):
        assert one.contexts[0].tokens.tolist() == other.contexts[0].tokens.tolist()
        assert (one.contexts[0].kinds == Kind.ACTION).any()


def test_what_does_not_parse_or_fit_is_kept_as_the_reason() -> None:
    found = annotated("no idea")
    assert all("no JSON" in e.info["skills_error"] for e in found.episodes)
    assert not any("skills" in e.info for e in found.episodes)
    long = annotated("{}", Analysis(max_tokens=200, max_context=210))
    assert all("too long" in e.info["skills_error"] for e in long.episodes)


def test_a_small_policy_may_write_plain_text() -> None:
    assert plain_skills("look first\n1: use grep\n9: never", 3) == Skills(
        "look first 9: never", ((1, "use grep"),)
    )
    with pytest.raises(UnparsableSkills, match="nothing readable"):
        plain_skills(" \n--", 2)
    own = replace(Analysis(200, 4096), parse=plain_skills)
    assert all(e.info["skills"].episode == "be quick" for e in annotated("be quick", own).episodes)
