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

import numpy as np

from jaxagent.data.kinds import Kind
from jaxagent.episodes.deadlines import (
    EnvironmentContractError,
    close_environment,
    describe,
    with_deadline,
)
from jaxagent.episodes.engine import Engine, Generation, Session
from jaxagent.episodes.environment import Environment, Segment, StepResult
from jaxagent.episodes.episode import Context, Episode
from jaxagent.episodes.protocol import (
    ActionProtocol,
    Command,
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


@dataclass
class ContextBuilder:
    """A context under construction."""

    tokens: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def feed(self, tokens: Sequence[int], kind: Kind, turn: int) -> None:
        """Adds tokens that were not sampled."""
        count = len(tokens)
        self.tokens.extend(tokens)
        self.kinds.extend([int(kind)] * count)
        self.turn_ids.extend([turn] * count)
        self.logprobs.extend([0.0] * count)
        self.versions.extend([-1] * count)

    def sampled(self, generation: Generation, turn: int) -> list[int]:
        """Adds what the policy sampled and returns its ids."""
        tokens = [int(token) for token in generation.tokens]
        self.tokens.extend(tokens)
        self.kinds.extend([int(Kind.ACTION)] * len(tokens))
        self.turn_ids.extend([turn] * len(tokens))
        self.logprobs.extend(float(x) for x in generation.logprobs)
        self.versions.extend(int(x) for x in generation.versions)
        return tokens

    def build(self) -> Context:
        return Context(
            tokens=np.asarray(self.tokens, np.int32),
            kinds=np.asarray(self.kinds, np.uint8),
            turn_ids=np.asarray(self.turn_ids, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            versions=np.asarray(self.versions, np.int32),
        )


class _Failed(Exception):
    """Carries an environment's failure out of the turns."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


@dataclass
class _Play:
    """The running state of one episode."""

    builder: ContextBuilder = field(default_factory=ContextBuilder)
    turn_rewards: list[float] = field(default_factory=list)
    truncated: str | None = None
    finished: str | None = None
    malformed: int = 0
    sampled: int = 0
    prompt: int = 0
    env_seconds: float = 0.0
    sample_seconds: float = 0.0
    env_info: Mapping[str, Any] = field(default_factory=dict)


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
    before_sampling: Callable[[], Awaitable[None]] | None = None,
) -> Episode:
    """Plays ``environment`` to its end and closes it, whatever happens.

    ``sampling`` is a dataclass with ``max_new_tokens``, ``stop_tokens`` and
    ``stop_strings``, which are set here for each turn. ``key`` seeds the session.
    A failing environment gives an episode with ``valid=False`` and reward 0, and
    ``error`` as ``"Class: message"``. Exceptions of the engine propagate.
    """
    started = time.monotonic()
    play = _Play()
    error: str | None = None
    close_error: str | None = None
    try:
        await _play(
            play, environment, engine, protocol, limits, sampling, key, started, before_sampling
        )
    except _Failed as failure:
        error = describe(failure.error)
    finally:
        close_error = await close_environment(environment, limits.close_timeout)
    rewards = tuple(play.turn_rewards)
    info = {
        "finished": play.finished,
        "malformed": play.malformed,
        "prompt_tokens": play.prompt,
        "seconds": time.monotonic() - started,
        "env_seconds": play.env_seconds,
        "sample_seconds": play.sample_seconds,
        "env": dict(play.env_info),
    }
    if close_error:
        info["close_error"] = close_error
    return Episode(
        task_id=task_id,
        group_id=group_id,
        contexts=(play.builder.build(),) if len(play.builder) else (),
        reward=0.0 if error else math.fsum(rewards),
        turn_rewards=rewards,
        valid=error is None,
        truncated=None if error else play.truncated,
        error=error,
        info=info,
    )


async def _play(
    play: _Play,
    environment: Environment,
    engine: Engine,
    protocol: ActionProtocol,
    limits: Limits,
    sampling: Any,
    key: int,
    started: float,
    before_sampling: Callable[[], Awaitable[None]] | None,
) -> None:
    builder = play.builder
    segments = await _timed(play, environment.reset(), limits.reset_timeout, "reset")
    with _contract():
        prompt = prompt_tokens(protocol, _checked(segments))
    play.prompt = len(prompt)
    if len(prompt) >= limits.max_context_tokens:
        raise _Failed(
            PromptTooLong(
                f"{len(prompt)} tokens leave no room in max_context_tokens="
                f"{limits.max_context_tokens}"
            )
        )
    pieces: list[Piece] = [(prompt, Kind.PROMPT)]
    session = engine.open_session(key)
    try:
        if before_sampling is not None:
            await before_sampling()
        for turn in range(limits.max_turns):
            new = [token for tokens, _ in pieces for token in tokens]
            room = limits.max_context_tokens - len(builder) - len(new)
            left = limits.max_seconds - (time.monotonic() - started)
            budget = limits.max_turn_tokens
            if limits.max_sampled_tokens is not None:
                budget = min(budget, limits.max_sampled_tokens - play.sampled)
            play.truncated = (
                "context" if room < 1 else "tokens" if budget < 1 else "time" if left <= 0 else None
            )
            if play.truncated:
                break
            generation = await _sample(
                play, session, new, _turn_sampling(sampling, protocol, min(budget, room)), left
            )
            if generation is None:
                play.truncated = "time"
                break
            for tokens, kind in pieces:
                builder.feed(tokens, kind, turn - 1)
            sampled = builder.sampled(generation, turn)
            pieces = []
            if not sampled:  # the engine's own bound was tighter than ours: not a turn
                play.truncated = "context"
                break
            play.sampled += len(sampled)
            play.turn_rewards.append(0.0)
            cut = generation.stop in ("length", "context")
            final = turn + 1 == limits.max_turns
            try:
                action = parse_tokens(protocol, sampled)
            except MalformedAction as malformed:
                play.malformed += 1
                play.truncated = _cut_cause(generation.stop, room, budget, limits)
                if play.truncated:
                    break
                reason = f"no action within {budget} tokens" if cut else malformed.reason
                told: Sequence[Segment] = (_Note(protocol.on_malformed(reason)),)
            else:
                cut = False
                if isinstance(action, Done):
                    play.finished = "done"
                    break
                told, ended = await _step(play, environment, action, limits)
                if ended:
                    play.finished = "environment"
                final = final or ended
            with _contract():
                pieces = observation_pieces(
                    protocol,
                    told,
                    last_token=sampled[-1],
                    max_tokens=limits.max_observation_tokens,
                    final=final,
                )
            if play.finished:
                break
            if final:
                play.truncated = "tokens" if cut else "turns"
        _feed_rest(builder, pieces, len(play.turn_rewards) - 1, limits)
    finally:
        session.close()
    if play.finished != "environment":
        result = await _timed(play, environment.step(None), limits.score_timeout, "scoring")
        _score(play, result)


def _turn_sampling(sampling: Any, protocol: ActionProtocol, max_new_tokens: int) -> Any:
    return replace(
        sampling,
        max_new_tokens=max_new_tokens,
        stop_tokens=protocol.stop_tokens,
        stop_strings=protocol.stop_strings,
    )


def _cut_cause(stop: str, room: int, budget: int, limits: Limits) -> str | None:
    """Why a turn without an action ends the episode; None when the policy is to be told."""
    if stop == "context" or (stop == "length" and room <= budget):
        return "context"
    if stop == "length" and (limits.end_on_long_turn or budget < limits.max_turn_tokens):
        return "tokens"
    return None


def _feed_rest(builder: ContextBuilder, pieces: Sequence[Piece], turn: int, limits: Limits) -> None:
    """Records the last observation, which no turn answered, where it fits.

    The engine never saw these tokens; they serve observation prediction.
    """
    size = sum(len(tokens) for tokens, _ in pieces)
    if len(builder) + size > limits.max_context_tokens:
        return
    for tokens, kind in pieces:
        builder.feed(tokens, kind, turn)


async def _sample(
    play: _Play, session: Session, new: Sequence[int], sampling: Any, seconds: float
) -> Generation | None:
    """One turn's tokens; None when the episode's time is over first."""
    began = time.monotonic()
    future = asyncio.wrap_future(session.generate(new, sampling))
    future.add_done_callback(lambda f: f.cancelled() or f.exception())  # marks it retrieved
    try:
        # Not cancelled on a time-out: the engine learns of it when the session is closed.
        done, _ = await asyncio.wait({future}, timeout=seconds)
    finally:
        play.sample_seconds += time.monotonic() - began
    return future.result() if done else None


async def _timed(play: _Play, call: Coroutine[Any, Any, T], seconds: float, what: str) -> T:
    began = time.monotonic()
    try:
        return await with_deadline(call, seconds, what)
    except Exception as error:
        raise _Failed(error) from error
    finally:
        play.env_seconds += time.monotonic() - began


async def _step(
    play: _Play, environment: Environment, action: Command, limits: Limits
) -> tuple[Sequence[Segment], bool]:
    result = await _timed(play, environment.step(action.text), limits.step_timeout, "step")
    return _score(play, result)


def _score(play: _Play, result: StepResult) -> tuple[Sequence[Segment], bool]:
    """Adds a step's reward to the current turn. Raises _Failed on an unusable result."""
    with _contract():
        segments = _checked(result.segments)
        reward = float(result.reward)
        if not math.isfinite(reward):
            raise EnvironmentContractError(f"reward must be finite, got {reward}")
        if play.turn_rewards:
            play.turn_rewards[-1] += reward
        else:
            play.turn_rewards.append(reward)
        if result.info:
            play.env_info = {**play.env_info, **result.info}
        return segments, bool(result.done)


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
