"""One episode, token in, token out.

Sampled ids are kept as they are and only new text is tokenised, so the context recorded
is, token for token, what the engine saw: each turn's input starts with the whole of the
turn before.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from jaxagent.data.kinds import Kind
from jaxagent.episodes.deadlines import (
    EnvironmentContractError,
    close_environment,
    describe,
    with_deadline,
)
from jaxagent.episodes.engine import Engine, Generation, Session
from jaxagent.episodes.environment import Environment, Segment, StepResult
from jaxagent.episodes.episode import Episode
from jaxagent.episodes.history import ContextBuilder, Exchange, Rewrite, context_key
from jaxagent.episodes.protocol import (
    ActionProtocol,
    Done,
    MalformedAction,
    Piece,
    observation_pieces,
    parse_tokens,
    prompt_tokens,
)

T = TypeVar("T")


class PromptTooLong(Exception):
    """A task's prompt leaves no room to act; a property of the task, not worth a retry."""


@dataclass(frozen=True)
class Limits:
    """What bounds one episode. Tokens are counts, times are seconds.

    Reaching ``max_turns``, ``max_context_tokens``, ``max_sampled_tokens`` (over the whole
    episode; None = no limit) or ``max_seconds`` (wall time, which is not reproducible)
    truncates the episode, and the world is scored as it stands. A turn without an action
    after ``max_turn_tokens`` is a malformed action, or truncates the episode
    (``"tokens"``) when ``end_on_long_turn``.
    """

    max_turns: int = 16
    max_turn_tokens: int = 512
    max_context_tokens: int = 8192
    max_sampled_tokens: int | None = None
    max_observation_tokens: int = 2048
    max_seconds: float = 1800.0
    reset_timeout: float = 300.0
    step_timeout: float = 180.0
    score_timeout: float = 900.0
    close_timeout: float = 60.0
    end_on_long_turn: bool = False

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_turn_tokens", "max_context_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"Limits.{name} must be at least 1, got {getattr(self, name)}")
        if self.max_observation_tokens < 32:
            raise ValueError(
                "Limits.max_observation_tokens must be at least 32 (the notice of a cut needs "
                f"room), got {self.max_observation_tokens}"
            )


async def run_episode(
    environment: Environment,
    engine: Engine,
    protocol: ActionProtocol,
    limits: Limits,
    sampling: Any,
    *,
    key: int,
    task_id: str,
    group_id: str,
    rewrite: Rewrite | None = None,
    before_sampling: Callable[[], Awaitable[None]] | None = None,
) -> Episode:
    """Plays ``environment`` to its end and closes it, whatever happens.

    ``rewrite`` (see ``history``) makes the episode one of several contexts.

    ``sampling`` is a dataclass with ``max_new_tokens``, ``stop_tokens`` and
    ``stop_strings``, which are set here for each turn. ``key`` seeds the session.
    A failing environment gives an episode with ``valid=False`` and reward 0, and
    ``error`` as ``"Class: message"``. Exceptions of the engine propagate.
    """
    play = _Play(environment, engine, protocol, limits, sampling, key, rewrite, before_sampling)
    error: str | None = None
    close_error: str | None = None
    try:
        await play.run()
    except _Failed as failure:
        error = describe(failure.error)
    finally:
        close_error = await close_environment(environment, limits.close_timeout)
    info = play.info()
    if close_error:
        info["close_error"] = close_error
    rewards = tuple(play.turn_rewards)
    return Episode(
        task_id=task_id,
        group_id=group_id,
        contexts=tuple(builder.build() for builder in play.contexts if len(builder)),
        reward=0.0 if error else math.fsum(rewards),
        turn_rewards=rewards,
        valid=error is None,
        truncated=None if error else play.truncated,
        error=error,
        info=info,
    )


class _Failed(Exception):
    """Carries an environment's failure out of the turns."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


@dataclass
class _Play:
    """One episode being played: what it was given, then how it stands."""

    environment: Environment
    engine: Engine
    protocol: ActionProtocol
    limits: Limits
    sampling: Any
    key: int
    rewrite: Rewrite | None
    before_sampling: Callable[[], Awaitable[None]] | None

    started: float = field(default_factory=time.monotonic)
    session: Session | None = None
    contexts: list[ContextBuilder] = field(default_factory=lambda: [ContextBuilder()])
    prompt: list[int] = field(default_factory=list)
    past: list[Exchange] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    truncated: str | None = None
    finished: str | None = None
    malformed: int = 0
    sampled: int = 0
    env_seconds: float = 0.0
    sample_seconds: float = 0.0
    env_info: Mapping[str, Any] = field(default_factory=dict)

    def info(self) -> dict[str, Any]:
        return {
            "finished": self.finished,
            "malformed": self.malformed,
            "prompt_tokens": len(self.prompt),
            "seconds": time.monotonic() - self.started,
            "env_seconds": self.env_seconds,
            "sample_seconds": self.sample_seconds,
            "env": dict(self.env_info),
        }

    async def run(self) -> None:
        """Raises _Failed when the environment fails."""
        limits = self.limits
        segments = await self._timed(self.environment.reset(), limits.reset_timeout, "reset")
        with _contract():
            self.prompt = prompt_tokens(self.protocol, _checked(segments))
        if len(self.prompt) >= limits.max_context_tokens:
            raise _Failed(
                PromptTooLong(
                    f"{len(self.prompt)} tokens leave no room in max_context_tokens="
                    f"{limits.max_context_tokens}"
                )
            )
        try:
            self.session = self.engine.open_session(self.key)
            if self.before_sampling is not None:
                await self.before_sampling()
            await self._turns()
        finally:
            if self.session is not None:
                self.session.close()
        if self.finished != "environment":
            step = self.environment.step(None)
            self._score(await self._timed(step, limits.score_timeout, "scoring"))

    async def _turns(self) -> None:
        pieces: list[Piece] = [(self.prompt, Kind.PROMPT)]
        for turn in range(self.limits.max_turns):
            if turn and self.rewrite is not None:
                pieces = self._rewritten(self.rewrite, pieces)
            new = [token for tokens, _ in pieces for token in tokens]
            room = self.limits.max_context_tokens - len(self.contexts[-1]) - len(new)
            budget = self.limits.max_turn_tokens
            if self.limits.max_sampled_tokens is not None:
                budget = min(budget, self.limits.max_sampled_tokens - self.sampled)
            generation = await self._sample(new, room, budget)
            if generation is None:
                break
            self._feed(pieces)
            sampled = self.contexts[-1].sampled(generation, turn)
            pieces = []
            if not sampled:  # the engine's own bound was tighter than ours: not a turn
                self.truncated = "context"
                break
            self.sampled += len(sampled)
            self.turn_rewards.append(0.0)
            cut = _cut_cause(generation.stop, room, budget, self.limits)
            pieces = await self._act(turn, sampled, generation.stop, cut, budget)
            if self.finished or self.truncated:
                break
            answer = tuple(token for tokens, _ in pieces for token in tokens)
            self.past.append(Exchange(tuple(sampled), answer))
        # The last observation, which no turn answered: the engine never saw it, and it is
        # recorded (where it fits) for observation prediction.
        self._feed(pieces)

    def _feed(self, pieces: Sequence[Piece]) -> None:
        builder, size = self.contexts[-1], sum(len(tokens) for tokens, _ in pieces)
        if len(builder) + size > self.limits.max_context_tokens:
            return
        for tokens, kind in pieces:
            builder.feed(tokens, kind, -1 if kind == Kind.PROMPT else len(self.turn_rewards) - 1)

    def _rewritten(self, rewrite: Rewrite, pieces: list[Piece]) -> list[Piece]:
        """What is fed next; a new context (and session) begins where history changed."""
        new = [token for tokens, _ in pieces for token in tokens]
        history = rewrite(self.prompt, self.past, self.limits.max_context_tokens)
        if history == [*self.contexts[-1].tokens, *new]:
            return pieces
        self._feed(pieces)
        assert self.session is not None
        self.session.close()
        self.contexts.append(ContextBuilder())
        self.session = self.engine.open_session(context_key(self.key, len(self.contexts) - 1))
        return [(history, Kind.PROMPT)]

    async def _sample(self, new: Sequence[int], room: int, budget: int) -> Generation | None:
        """One turn's tokens; None, with ``truncated`` set, when a limit forbids the turn."""
        began = time.monotonic()
        left = self.limits.max_seconds - (began - self.started)
        self.truncated = (
            "context" if room < 1 else "tokens" if budget < 1 else "time" if left <= 0 else None
        )
        if self.truncated or self.session is None:
            return None
        sampling = replace(
            self.sampling,
            max_new_tokens=min(budget, room),
            stop_tokens=self.protocol.stop_tokens,
            stop_strings=self.protocol.stop_strings,
        )
        future = asyncio.wrap_future(self.session.generate(new, sampling))
        future.add_done_callback(lambda f: f.cancelled() or f.exception())  # marks it retrieved
        try:
            # Not cancelled on a time-out: the engine learns of it when the session is closed.
            done, _ = await asyncio.wait({future}, timeout=left)
        finally:
            self.sample_seconds += time.monotonic() - began
        if not done:
            self.truncated = "time"
            return None
        generation: Generation = future.result()
        return generation

    async def _act(
        self, turn: int, sampled: list[int], stop: str, cut: str | None, budget: int
    ) -> list[Piece]:
        """Runs the turn's action, if it has one, and returns what the policy is to read."""
        final = turn + 1 == self.limits.max_turns
        at_limit = "turns"
        try:
            action = parse_tokens(self.protocol, sampled)
        except MalformedAction as malformed:
            self.malformed += 1
            if cut:
                self.truncated = cut
                return []
            reason = malformed.reason
            if stop == "length":
                reason, at_limit = f"no action within {budget} tokens", "tokens"
            told: Sequence[Segment] = (_Note(self.protocol.on_malformed(reason)),)
        else:
            if isinstance(action, Done):
                self.finished = "done"
                return []
            call = self.environment.step(action.text)
            told, ended = self._score(await self._timed(call, self.limits.step_timeout, "step"))
            if ended:
                self.finished = "environment"
                final = True
        if final and not self.finished:
            self.truncated = at_limit
        with _contract():
            return observation_pieces(
                self.protocol,
                told,
                last_token=sampled[-1],
                max_tokens=self.limits.max_observation_tokens,
                final=final,
            )

    async def _timed(self, call: Coroutine[Any, Any, T], seconds: float, what: str) -> T:
        began = time.monotonic()
        try:
            return await with_deadline(call, seconds, what)
        except Exception as error:
            raise _Failed(error) from error
        finally:
            self.env_seconds += time.monotonic() - began

    def _score(self, result: StepResult) -> tuple[Sequence[Segment], bool]:
        """Adds a step's reward to the current turn. Raises _Failed on an unusable result."""
        with _contract():
            segments = _checked(result.segments)
            reward = float(result.reward)
            if not math.isfinite(reward):
                raise EnvironmentContractError(f"reward must be finite, got {reward}")
            if self.turn_rewards:
                self.turn_rewards[-1] += reward
            else:
                self.turn_rewards.append(reward)
            if result.info:
                self.env_info = {**self.env_info, **result.info}
            return segments, bool(result.done)


def _cut_cause(stop: str, room: int, budget: int, limits: Limits) -> str | None:
    """Why a turn without an action ends the episode; None when the policy is to be told."""
    if stop == "context" or (stop == "length" and room <= budget):
        return "context"
    if stop == "length" and (limits.end_on_long_turn or budget < limits.max_turn_tokens):
        return "tokens"
    return None


def _checked(segments: Sequence[Segment]) -> Sequence[Segment]:
    for segment in segments:
        if segment.source not in ("observation", "template"):
            raise EnvironmentContractError(
                f"segment source must be 'observation' or 'template', got {segment.source!r}"
            )
    return segments


class _contract:  # noqa: N801  (used like a function)
    """Turns any exception about an environment's return value into its failure."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, _Failed):
            raise _Failed(
                error
                if isinstance(error, EnvironmentContractError)
                else EnvironmentContractError(describe(error))
            ) from error


@dataclass(frozen=True)
class _Note:
    text: str
    source: str = "template"
