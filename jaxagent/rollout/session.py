"""Sessions and generations: what users of the engine hold, and its record of each."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from jaxagent.rollout.sampling import SamplingConfig

Stop = Literal["stop_token", "stop_string", "length", "context"]
Decode = Callable[[Sequence[int]], str]


class Generation(NamedTuple):
    """Tokens of one ``generate`` call; arrays of shape ``[n]``, the stop token included.

    ``logprobs`` follow the convention of ``jaxagent.rollout.sampling``; ``versions`` says
    which weights drew each token. ``stop`` is ``"context"`` where the sequence filled
    ``max_len``, and then ``n`` can be 0.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    stop: Stop


class SessionClosedError(RuntimeError):
    """The session was closed before or while it generated."""


@dataclass(eq=False)
class Job:
    """One ``generate`` call inside the engine."""

    record: "Record"
    new_tokens: list[int]
    sampling: SamplingConfig
    future: "Future[Generation]" = field(default_factory=Future)
    base: int = 0
    limit: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    searched: int = 0
    done: bool = False

    def generation(self, stop: Stop) -> Generation:
        """Return what was drawn so far."""
        return Generation(
            np.array(self.tokens, np.int32),
            np.array(self.logprobs, np.float32),
            np.array(self.versions, np.int32),
            stop,
        )

    def cut_at_stop_string(self, decode: Decode) -> bool:
        """Drop what follows the token that completes a stop string; False if there is none.

        Each call searches only prefixes that end in tokens drawn since the last one.
        """
        first, self.searched = self.searched, len(self.tokens)
        if not _holds(decode(self.tokens), self.sampling.stop_strings):
            return False
        for length in range(first + 1, len(self.tokens)):
            if _holds(decode(self.tokens[:length]), self.sampling.stop_strings):
                for kept in (self.tokens, self.logprobs, self.versions):
                    del kept[length:]
                break
        return True


@dataclass(eq=False)
class Record:
    """The engine's record of a session; only the engine's thread changes it.

    ``tokens[:cached]`` are in the cache of ``slot``. At least the last token is always
    outside: feeding it is what draws the next one.
    """

    key_data: NDArray[np.int32]
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    slot: int | None = None
    job: Job | None = None
    last_used: int = 0
    prompt: tuple[bytes, int] | None = None
    version: int = 0
    closed: bool = False


def _holds(text: str, strings: Sequence[str]) -> bool:
    return any(string in text for string in strings)


class Session:
    """One growing token sequence; sampled tokens become part of it by themselves."""

    def __init__(
        self,
        record: Record,
        generate: Callable[[Record, Sequence[int], SamplingConfig], "Future[Generation]"],
        close: Callable[[Record], None],
    ) -> None:
        self._record = record
        self._generate = generate
        self._close = close

    def generate(self, new_tokens: Sequence[int], sampling: SamplingConfig) -> "Future[Generation]":
        """Append ``new_tokens`` (an observation) to the sequence and sample what follows.

        One generation at a time. Where the new tokens leave no room, the result is empty,
        stops with ``"context"``, and the sequence stays as it was. Cancelling the future
        rolls the sequence back to before the call.
        """
        return self._generate(self._record, new_tokens, sampling)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The sequence so far; stable while no generation is under way."""
        return tuple(self._record.tokens)

    def close(self) -> None:
        """Free the slot; a generation under way fails with ``SessionClosedError``."""
        self._close(self._record)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def key_words(key: "int | jax.Array | np.ndarray") -> NDArray[np.int32]:
    """Return a key's two words as int32 bits: of a seed, a typed key, or ``[2]`` key data."""
    if isinstance(key, int):
        words = np.array([key >> 32 & 0xFFFFFFFF, key & 0xFFFFFFFF], np.uint32)
    else:
        if isinstance(key, jax.Array) and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = jax.random.key_data(key)
        words = np.asarray(key, np.uint32)
        if words.shape != (2,):
            raise ValueError(
                f"open_session: key data must have shape [2] (threefry), got {words.shape}"
            )
    return words.view(np.int32)
