import asyncio
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxagent.data.kinds import Kind
from jaxagent.episodes.history import (
    Exchange,
    context_key,
    drop_oldest_turns,
    rewrite_actions,
    whole_history,
)
from jaxagent.episodes.protocol import parse_tokens
from jaxagent.episodes.rollout import Limits, run_episode
from tests.episodes.fakes import (
    DONE,
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


def play(rewrite, turns, limits, answer="out"):
    worlds = Worlds(lambda env, at: Result([Text(answer)]) if at == "step" else None)
    environment = worlds(ToyTask("t"))
    counter = iter(turns)
    engine = FakeEngine(lambda key, context, turn: next(counter))
    episode = asyncio.run(
        run_episode(
            environment,
            engine,
            PROTOCOL,
            limits,
            Sampling(),
            key=7,
            task_id="t",
            group_id="g",
            rewrite=rewrite,
        )
    )
    assert worlds.all_closed_once() and all(s.closed == 1 for s in engine.sessions)
    return episode, engine


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def check(episode, engine, turns):
    """Each context is what its session saw, and each sampled token is trained exactly once."""
    assert len(episode.contexts) == len(engine.sessions)
    for context, session in zip(episode.contexts, engine.sessions, strict=True):
        seen = len(session.context)
        assert context.tokens[:seen].tolist() == session.context
        assert not np.isin(context.kinds[seen:], [Kind.ACTION, Kind.PROMPT]).any()
        assert ((context.kinds == Kind.PROMPT) == (context.turn_ids == -1)).all()
    actions = [c.tokens[(c.kinds == Kind.ACTION)].tolist() for c in episode.contexts]
    assert flat(actions) == flat(turns)
    ids = [c.turn_ids[(c.kinds == Kind.ACTION)].tolist() for c in episode.contexts]
    assert flat(ids) == [n for n, turn in enumerate(turns) for _ in turn]
    observed = sum(int((c.kinds == Kind.OBSERVATION).sum()) for c in episode.contexts)
    assert observed == len("out") * (len(turns) - 1)


def test_full_context_forgets_the_oldest_turns_instead_of_ending():
    turns = [command(f"echo {n}") for n in range(12)] + [[DONE]]
    limits = Limits(max_turns=20, max_context_tokens=80, max_turn_tokens=20)
    episode, engine = play(drop_oldest_turns(20), turns, limits)
    assert episode.info["finished"] == "done" and episode.num_turns == 13
    assert 2 < len(episode.contexts) < 7
    check(episode, engine, turns)
    assert len({session.key for session in engine.sessions}) == len(engine.sessions)
    prompt = engine.sessions[0].inputs[0]
    assert all(s.inputs[0][: len(prompt)] == prompt for s in engine.sessions)
    assert max(len(context) for context in episode.contexts) <= 80
    # The newest turn is always among what the policy is reminded of.
    assert all("out" in TOKENIZER.decode(s.inputs[0]) for s in engine.sessions[1:])


def test_without_rewriting_the_same_episode_is_truncated():
    turns = [command(f"echo {n}") for n in range(13)]
    limits = Limits(max_turns=20, max_context_tokens=80, max_turn_tokens=20)
    episode, _ = play(None, turns, limits)
    assert episode.truncated == "context" and len(episode.contexts) == 1


def without_thoughts(tokens):
    return PROTOCOL.encode_action(parse_tokens(PROTOCOL, tokens))


def test_dropping_thoughts_starts_a_context_only_where_there_was_one():
    think = TOKENIZER.encode("hm ")
    turns = [command("a"), [*think, *command("b")], command("c"), [*think, *command("d")], [DONE]]
    episode, engine = play(rewrite_actions(without_thoughts), turns, Limits())
    check(episode, engine, turns)
    assert len(episode.contexts) == 3
    first, second, third = (TOKENIZER.decode(s.inputs[0]) for s in engine.sessions)
    assert second == first + "<cmd>a</cmd><obs>out<cmd>b</cmd><obs>out"
    assert third == second + "<cmd>c</cmd><obs>out<cmd>d</cmd><obs>out"


def test_a_rewrite_that_changes_nothing_keeps_one_context():
    turns = [command("a"), command("b"), [DONE]]
    episode, engine = play(lambda prompt, past, limit: whole_history(prompt, past), turns, Limits())
    check(episode, engine, turns)
    assert len(episode.contexts) == 1


sizes = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), max_size=25)


@given(sizes, st.integers(60, 120), st.integers(1, 20))
def test_forgetting_is_bounded_and_seldom(sizes, limit, reserve):
    rewrite = drop_oldest_turns(reserve)
    past, previous, restarts = [], [], 0
    prompt = [-1] * 10
    for number, (action, answer) in enumerate(sizes):
        past.append(Exchange((number,) * action, (1000 + number,) * answer))
        history = rewrite(prompt, past, limit)
        assert history[:10] == prompt
        tail = [*past[-1].action, *past[-1].answer]
        assert history[len(history) - len(tail) :] == tail
        assert len(history) + reserve <= limit or len(history) <= limit // 2
        restarts += history[: len(previous)] != previous
        previous = history
    total = sum(a + b for a, b in sizes)
    # Each time a stretch of at least limit - limit/2 - reserve - one turn had come in.
    assert restarts * max(1, limit - limit // 2 - reserve - 24) <= total


def test_context_keys_differ_and_the_first_is_the_episodes():
    assert context_key(5, 0) == 5
    assert len({context_key(key, n) for key in range(20) for n in range(20)}) == 400
    with pytest.raises(ValueError, match="reserve >= 1"):
        drop_oldest_turns(0)
