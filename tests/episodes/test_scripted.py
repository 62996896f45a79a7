import asyncio

import numpy as np

from jaxagent.data.kinds import Kind
from jaxagent.episodes.scripted import demonstrate
from tests.episodes.fakes import PROTOCOL, Result, ToyTask, Worlds, command


def test_demonstration_has_the_layout_of_a_sampled_episode():
    worlds = Worlds(lambda env, at: Result(reward=1.0, done=True) if at == "score" else None)
    environment = worlds(ToyTask("t", secret=9))
    episode = asyncio.run(demonstrate(environment, ["ls", "pwd"], PROTOCOL, task_id="t"))
    assert environment.actions == ["ls", "pwd", None]
    assert episode.reward == 1.0 and episode.truncated is None and episode.num_turns == 3
    (context,) = episode.contexts
    action = context.kinds == Kind.ACTION
    first = context.tokens[action & (context.turn_ids == 0)]
    assert first.tolist() == command("ls")
    assert (context.versions[action] == 0).all() and not np.any(context.logprobs)
    assert worlds.all_closed_once()
