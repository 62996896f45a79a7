"""A sampler that says what it is told to: demonstrations, and environments without a model."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxagent.episodes.environment import Environment
from jaxagent.episodes.episode import Episode
from jaxagent.episodes.protocol import Action, ActionProtocol, Command, Done
from jaxagent.episodes.rollout import Limits, run_episode


@dataclass(frozen=True)
class ScriptedGeneration:
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    stop: str


class ScriptedSession:
    """Answers turn after turn with the script's tokens, cut to ``max_new_tokens``."""

    def __init__(self, turns: Sequence[Sequence[int]], version: int = 0) -> None:
        self._turns = list(turns)
        self._version = version
        self.context: list[int] = []
        self.closed = False

    def generate(self, new_tokens: Sequence[int], sampling: Any) -> Future[ScriptedGeneration]:
        if not self._turns:
            raise RuntimeError("the script has no turns left")
        full = self._turns.pop(0)
        tokens = list(full[: sampling.max_new_tokens])
        self.context.extend([*new_tokens, *tokens])
        future: Future[ScriptedGeneration] = Future()
        future.set_result(
            ScriptedGeneration(
                tokens=np.asarray(tokens, np.int32),
                logprobs=np.zeros(len(tokens), np.float32),
                versions=np.full(len(tokens), self._version, np.int32),
                stop="stop_token" if len(tokens) == len(full) else "length",
            )
        )
        return future

    def close(self) -> None:
        self.closed = True


class ScriptedEngine:
    """Every session plays ``script(key)``, a sequence of turns of token ids."""

    def __init__(self, script: Callable[[int], Sequence[Sequence[int]]], version: int = 0) -> None:
        self._script = script
        self.version = version
        self.sessions: list[ScriptedSession] = []

    def open_session(self, key: int) -> ScriptedSession:
        session = ScriptedSession(self._script(key), self.version)
        self.sessions.append(session)
        return session


@dataclass(frozen=True)
class _Sampling:
    max_new_tokens: int = 0
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


async def demonstrate(
    environment: Environment,
    commands: Sequence[str],
    protocol: ActionProtocol,
    limits: Limits | None = None,
    *,
    task_id: str,
    group_id: str = "demonstration",
) -> Episode:
    """Runs reference commands, then ``<done/>``, as if the policy had sampled them.

    The episode has the very layout of sampled ones (log-probs 0, version 0), ready for
    supervised training on its ACTION tokens; its reward tells whether the reference works.
    """
    actions: list[Action] = [*map(Command, commands), Done()]
    turns = [protocol.encode_action(action) for action in actions]
    return await run_episode(
        environment,
        ScriptedEngine(lambda key: turns),
        protocol,
        limits or Limits(max_turns=len(actions)),
        _Sampling(),
        key=0,
        task_id=task_id,
        group_id=group_id,
    )
