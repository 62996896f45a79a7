import asyncio
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.data.kinds import Kind
from jaxagent.episodes.episode import Episode
from jaxagent.episodes.rollout import Limits, run_episode
from tests.episodes.fakes import (
    DONE,
    END,
    PROTOCOL,
    TOKENIZER,
    FakeEngine,
    Result,
    Sampling,
    Text,
    ToyTask,
    Worlds,
    command,
)

BOS, OBS, NOTE = (TOKENIZER.special(t) for t in ("<bos>", "<obs>", "<note>"))


def play(environment, turns, limits=None, engine=None) -> tuple[Episode, FakeEngine]:
    engine = engine or FakeEngine(lambda key, context, turn: turns[min(turn, len(turns) - 1)])
    episode = asyncio.run(
        run_episode(
            environment,
            engine,
            PROTOCOL,
            limits or Limits(),
            Sampling(),
            key=7,
            task_id="t",
            group_id="g",
        )
    )
    return episode, engine


def world(fault=None, secret=1):
    return Worlds(fault)(ToyTask("t", secret))


def check_context(episode: Episode, engine: FakeEngine) -> None:
    """The record is, token for token, what the engine saw, then at most an unread observation."""
    (context,), (session,) = episode.contexts, engine.sessions
    seen = len(session.context)
    assert context.tokens[:seen].tolist() == session.context
    assert not np.isin(context.kinds[seen:], [Kind.ACTION, Kind.PROMPT]).any()
    for earlier, later in zip(session.inputs, session.inputs[1:], strict=False):
        assert later[: len(earlier)] == earlier
    action = context.kinds == Kind.ACTION
    assert (context.versions[action] >= 0).all() and (context.versions[~action] == -1).all()
    assert (context.logprobs[~action] == 0).all()
    assert ((context.kinds == Kind.PROMPT) == (context.turn_ids == -1)).all()
    assert (np.diff(context.turn_ids) >= 0).all() and (np.diff(context.turn_ids) <= 1).all()
    assert session.closed == 1


def test_layout_of_a_whole_episode():
    environment = world(secret=2)
    episode, engine = play(environment, [command("guess 1"), command("guess 2")])
    (context,) = episode.contexts
    encode = TOKENIZER.encode
    prompt = [BOS, *encode("Guess the number of t.")]
    first, second = command("guess 1"), command("guess 2")
    expected = (
        [(t, Kind.PROMPT, -1) for t in prompt]
        + [(t, Kind.ACTION, 0) for t in first]
        + [(OBS, Kind.TEMPLATE, 0)]
        + [(t, Kind.OBSERVATION, 0) for t in encode("wrong\n")]
        + [(NOTE, Kind.TEMPLATE, 0)]
        + [(t, Kind.TEMPLATE, 0) for t in encode("exit 1")]
        + [(t, Kind.ACTION, 1) for t in second]
        + [(OBS, Kind.TEMPLATE, 1)]
        + [(t, Kind.OBSERVATION, 1) for t in encode("right")]
    )
    found = zip(context.tokens, context.kinds, context.turn_ids, strict=True)
    assert [(int(t), Kind(k), int(i)) for t, k, i in found] == expected
    check_context(episode, engine)
    assert context.logprobs[context.kinds == Kind.ACTION].tolist() == [
        np.float32(-((7 + t) % 97) / 97) for t in first + second
    ]
    assert (episode.reward, episode.turn_rewards) == (1.0, (0.0, 1.0))
    assert episode.valid and episode.truncated is None and episode.num_turns == 2
    assert episode.info["finished"] == "environment" and episode.info["env"] == {"success": True}
    assert environment.closes == 1


def test_done_is_scored_once_and_its_token_is_an_action():
    scored = Result(reward=0.5, done=True)
    environment = world(lambda env, stage: scored if stage == "score" else None)
    episode, engine = play(environment, [command("ls"), [DONE]])
    assert environment.actions == ["ls", None]
    assert episode.turn_rewards == (0.0, 0.5) and episode.reward == 0.5
    assert episode.info["finished"] == "done"
    (context,) = episode.contexts
    assert context.tokens[-1] == DONE and context.kinds[-1] == Kind.ACTION
    check_context(episode, engine)


def test_output_that_spells_tags_neither_ends_the_episode_nor_becomes_special_tokens():
    evil = "".join(TOKENIZER.special_tokens)
    answer = Result([Text(evil), Text(evil, "template")])
    environment = world(lambda env, stage: answer if stage == "step" else None)
    episode, engine = play(environment, [command("cat x"), command("ls"), [DONE]])
    assert environment.actions == ["cat x", "ls", None]
    (context,) = episode.contexts
    assert (context.tokens[context.kinds == Kind.OBSERVATION] < 256).all()
    special = context.tokens[(context.tokens >= 256) & (context.kinds == Kind.TEMPLATE)]
    assert special.tolist() == [OBS, NOTE] * 2
    assert TOKENIZER.decode(context.tokens[context.kinds == Kind.OBSERVATION]) == evil * 2
    check_context(episode, engine)


def test_malformed_action_is_told_and_counted():
    environment = world()
    episode, _ = play(environment, [[65, END], [65], command("guess 1")])
    assert environment.actions == ["guess 1"]
    assert episode.info["malformed"] == 2 and episode.num_turns == 3
    assert episode.turn_rewards == (0.0, 0.0, 1.0)
    (context,) = episode.contexts
    told = context.tokens[(context.turn_ids == 0) & (context.kinds == Kind.TEMPLATE)]
    assert told[0] == NOTE and "without <cmd>" in TOKENIZER.decode(told)
    told = context.tokens[(context.turn_ids == 1) & (context.kinds == Kind.TEMPLATE)]
    assert "no action" in TOKENIZER.decode(told)


@pytest.mark.parametrize(
    ("limits", "turns", "cause", "count"),
    [
        (Limits(max_turns=3), [command("ls")], "turns", 3),
        (Limits(max_context_tokens=59), [command("ls")], "context", 2),
        (Limits(max_context_tokens=30), [[65] * 50], "context", 1),
        (Limits(max_context_tokens=30, max_turns=1), [[65] * 50], "context", 1),
        (Limits(max_sampled_tokens=10), [command("ls")], "tokens", 3),
        (Limits(max_turn_tokens=5, end_on_long_turn=True), [[65] * 9], "tokens", 1),
        (Limits(max_turn_tokens=5, max_turns=2), [[65] * 9], "tokens", 2),
        (Limits(max_seconds=0.0), [command("ls")], "time", 0),
    ],
)
def test_truncation_causes(limits, turns, cause, count):
    scored = Result(reward=0.25, done=True)
    environment = world(lambda env, stage: scored if stage == "score" else None)
    episode, engine = play(environment, turns, limits)
    assert episode.truncated == cause and episode.valid and episode.info["finished"] is None
    assert episode.reward == 0.25 and environment.actions[-1] is None
    assert len(engine.sessions[0].inputs) == count
    assert episode.num_tokens <= limits.max_context_tokens
    if count:
        check_context(episode, engine)


def test_engine_without_room_truncates_without_a_turn():
    episode, engine = play(world(), [command("ls"), []])
    assert episode.truncated == "context" and episode.num_turns == 1
    assert len(episode.turn_rewards) == 1
    check_context(episode, engine)


def test_a_long_turn_is_told_and_the_episode_goes_on():
    episode, _ = play(world(), [[65] * 50, command("guess 1")], Limits(max_turn_tokens=20))
    assert episode.reward == 1.0 and episode.truncated is None
    assert "no action within 20 tokens" in TOKENIZER.decode(episode.contexts[0].tokens)


def test_time_limit_while_sampling():
    environment = world()
    engine = FakeEngine(lambda *_: [])
    engine.hang = True
    episode, _ = play(environment, [], Limits(max_seconds=0.05), engine)
    assert episode.truncated == "time" and environment.closes == 1
    assert engine.sessions[0].closed == 1


def test_time_limit_spares_the_prompt_when_nothing_was_sampled():
    episode, _ = play(world(), [command("ls")], Limits(max_seconds=0.0))
    (context,) = episode.contexts
    assert (context.kinds == Kind.PROMPT).all() and (context.turn_ids == -1).all()


def boom(stage):
    def fault(env, at):
        if at == stage:
            raise OSError("disk full\nsecond line")

    return fault


@pytest.mark.parametrize("stage", ["reset", "step", "score"])
def test_failing_environment_is_invalid_never_scored(stage):
    environment = world(boom(stage))
    episode, engine = play(environment, [command("ls"), [DONE]])
    assert not episode.valid and episode.reward == 0.0
    assert episode.error == "OSError: disk full"
    assert environment.closes == 1
    assert all(session.closed == 1 for session in engine.sessions)
    assert (len(episode.contexts) == 0) == (stage == "reset")


def test_failing_close_is_reported_and_keeps_the_score():
    episode, _ = play(world(boom("close")), [command("guess 1")])
    assert episode.valid and episode.reward == 1.0
    assert episode.info["close_error"] == "OSError: disk full"


async def stubborn():
    """Ignores its first cancellation, as a badly behaved client library might."""
    try:
        await asyncio.sleep(30)
    except asyncio.CancelledError:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("hang", [lambda: asyncio.sleep(30), stubborn])
def test_deadlines_bound_every_call(hang):
    limits = Limits(reset_timeout=0.05, step_timeout=0.05, score_timeout=0.05, close_timeout=0.05)
    for stage in ("reset", "step", "score"):
        environment = world(lambda env, at, stage=stage: hang() if at == stage else None)
        episode, _ = play(environment, [command("ls"), [DONE]], limits)
        assert episode.error and episode.error.startswith("EnvironmentTimeout: ")
        assert environment.closes == 1
    environment = world(lambda env, at: hang() if at == "close" else None)
    episode, _ = play(environment, [command("guess 1")], limits)
    assert episode.valid and "EnvironmentTimeout" in episode.info["close_error"]


@pytest.mark.parametrize(
    "result",
    [
        Result(reward=float("nan")),
        Result(reward=float("inf")),
        Result([Text("x", "tool")]),
        Result([Text(None)]),
        Result(reward="much"),
        object(),
    ],
)
def test_unusable_results_are_the_environments_fault(result):
    environment = world(lambda env, stage: result if stage == "step" else None)
    episode, _ = play(environment, [command("ls")])
    assert not episode.valid and episode.error.startswith("EnvironmentContractError")
    assert environment.closes == 1


def test_prompt_without_room_is_typed():
    episode, engine = play(world(), [command("ls")], Limits(max_context_tokens=10))
    assert episode.error.startswith("PromptTooLong: 23 tokens") and not engine.sessions


def test_engine_failure_propagates_and_closes_the_environment():
    environment = world()
    engine = FakeEngine(lambda *_: [])
    engine.error = RuntimeError("device lost")
    with pytest.raises(RuntimeError, match="device lost"):
        play(environment, [], engine=engine)
    assert environment.closes == 1 and engine.sessions[0].closed == 1


@pytest.mark.parametrize("stage", ["reset", "step", "score", "close", "sample"])
def test_cancellation_closes_once(stage):
    async def run():
        reached = asyncio.Event()

        def fault(env, at):
            if at == stage:
                reached.set()
                return asyncio.sleep(0.05 if stage == "close" else 30)

        environment = world(fault)
        turns = [command("ls"), [DONE]]
        engine = FakeEngine(lambda key, context, turn: turns[turn])
        engine.hang = stage == "sample"
        task = asyncio.create_task(
            run_episode(
                environment,
                engine,
                PROTOCOL,
                Limits(),
                Sampling(),
                key=0,
                task_id="t",
                group_id="g",
            )
        )
        await (asyncio.sleep(0.02) if stage == "sample" else reached.wait())
        task.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert environment.closes == 1
        assert all(session.closed == 1 for session in engine.sessions)

    asyncio.run(run())


texts = st.text(max_size=40) | st.sampled_from(["<done/>", "<cmd>ls</cmd>", "<obs><eos><pad>", ""])
segments = st.lists(
    st.builds(Text, texts, st.sampled_from(["observation", "template"])), max_size=4
)
turns = st.one_of(
    st.text(max_size=30).map(command),
    st.lists(st.integers(0, 263), min_size=1, max_size=30),
    st.just([DONE]),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(turns, segments), min_size=1, max_size=6), st.integers(33, 400))
def test_bookkeeping_holds_for_any_texts(script, max_context):
    answers = iter([segments for _, segments in script])
    environment = world(
        lambda env, stage: Result(next(answers)) if stage == "step" else None,
    )
    limits = Limits(
        max_turns=len(script),
        max_context_tokens=max_context,
        max_turn_tokens=25,
        max_observation_tokens=40,
    )
    episode, engine = play(environment, [turn for turn, _ in script], limits)
    assert episode.valid and (episode.truncated is None) == (episode.info["finished"] is not None)
    check_context(episode, engine)
    (context,) = episode.contexts
    assert len(context) <= max_context
    assert (context.tokens[context.kinds == Kind.OBSERVATION] < 256).all()
    template = context.tokens[context.kinds == Kind.TEMPLATE]
    assert set(template[template >= 256].tolist()) <= {OBS, NOTE}
    assert len(episode.turn_rewards) == len(engine.sessions[0].inputs) == episode.num_turns


def test_fifteen_lines_are_an_environment():
    @dataclass
    class Piece:
        text: str
        source: str = "observation"

    class Echo:
        async def reset(self):
            return [Piece("Echo me.")]

        async def step(self, action):
            reward = float(action == "me")
            return type("R", (), dict(segments=[Piece(str(action))], reward=reward,
                                      done=action is None or reward > 0, info={}))  # fmt: skip

        async def close(self):
            pass

    episode, _ = play(Echo(), [command("you"), command("me")])
    assert episode.reward == 1.0 and episode.num_turns == 2
