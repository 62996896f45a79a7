"""A policy without a model and a world without a terminal."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxagent.data.tokenizer import ByteTokenizer
from jaxagent.episodes.protocol import compact_protocol

TOKENIZER = ByteTokenizer()
PROTOCOL = compact_protocol(TOKENIZER)
CMD, END, DONE = (TOKENIZER.special(t) for t in ("<cmd>", "</cmd>", "<done/>"))


def command(text: str) -> list[int]:
    return [CMD, *TOKENIZER.encode(text), END]


@dataclass(frozen=True)
class Sampling:
    temperature: float = 1.0
    max_new_tokens: int = 0
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Generation:
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    stop: str


Policy = Callable[[int, list[int], int], Sequence[int]]  # key, context, turn -> tokens


@dataclass
class FakeSession:
    engine: "FakeEngine"
    key: int
    context: list[int] = field(default_factory=list)
    inputs: list[list[int]] = field(default_factory=list)
    turn: int = 0
    closed: int = 0

    def generate(self, new_tokens: Sequence[int], sampling: Any) -> Future:
        assert not self.closed
        future: Future = Future()
        if self.engine.hang:
            return future
        if self.engine.error is not None:
            future.set_exception(self.engine.error)
            return future
        self.context.extend(int(t) for t in new_tokens)
        self.inputs.append(list(self.context))
        full = [int(t) for t in self.engine.policy(self.key, self.context, self.turn)]
        self.turn += 1
        tokens = full[: sampling.max_new_tokens]
        self.context.extend(tokens)
        logprobs = [-((self.key + t) % 97) / 97 for t in tokens]
        future.set_result(
            Generation(
                np.asarray(tokens, np.int32),
                np.asarray(logprobs, np.float32),
                np.full(len(tokens), self.engine.version, np.int32),
                "length" if len(full) > len(tokens) else "stop_token",
            )
        )
        return future

    def close(self) -> None:
        self.closed += 1


class FakeEngine:
    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.version = 0
        self.hang = False
        self.error: Exception | None = None
        self.sessions: list[FakeSession] = []

    def open_session(self, key: int) -> FakeSession:
        self.sessions.append(FakeSession(self, key))
        return self.sessions[-1]


def keyed_policy(key: int, context: list[int], turn: int) -> list[int]:
    """One of a few actions, by key and position, as the engine's contract has it."""
    draw = hashlib.blake2b(f"{key}/{len(context)}".encode(), digest_size=1).digest()[0]
    return [command("guess 1"), command("guess 2"), [65, 66, END], [DONE]][draw % 4]


@dataclass(frozen=True)
class Text:
    text: str
    source: str = "observation"


@dataclass(frozen=True)
class Result:
    segments: Sequence[Text] = ()
    reward: float = 0.0
    done: bool = False
    info: dict = field(default_factory=dict)


@dataclass(frozen=True)
class ToyTask:
    id: str
    secret: int = 1


class Worlds:
    """Makes toy environments and counts those open; ``fault`` may break or delay them."""

    def __init__(self, fault: Callable[["ToyEnvironment", str], Any] | None = None) -> None:
        self.fault = fault
        self.made: list[ToyEnvironment] = []

    def __call__(self, task: ToyTask) -> "ToyEnvironment":
        self.made.append(ToyEnvironment(task, self, len(self.made)))
        return self.made[-1]

    @property
    def closes(self) -> list[int]:
        return [world.closes for world in self.made]

    def all_closed_once(self) -> bool:
        return all(count == 1 for count in self.closes)


class ToyEnvironment:
    def __init__(self, task: ToyTask, worlds: Worlds, number: int) -> None:
        self.task, self.worlds, self.number = task, worlds, number
        self.closes = 0
        self.actions: list[str | None] = []

    async def _fault(self, stage: str) -> Any:
        if self.worlds.fault is None:
            return None
        outcome = self.worlds.fault(self, stage)
        return await outcome if asyncio.iscoroutine(outcome) else outcome

    async def reset(self) -> Sequence[Text]:
        await self._fault("reset")
        return [Text(f"Guess the number of {self.task.id}.")]

    async def step(self, action: str | None) -> Result:
        self.actions.append(action)
        replaced = await self._fault("step" if action is not None else "score")
        if replaced is not None:
            return replaced
        if action is None:
            return Result(done=True)
        if action == f"guess {self.task.secret}":
            return Result([Text("right")], reward=1.0, done=True, info={"success": True})
        return Result([Text("wrong\n"), Text("exit 1", "template")])

    async def close(self) -> None:
        await self._fault("close")
        self.closes += 1
