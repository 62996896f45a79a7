"""The tokens of an episode under construction, and histories that do not only grow.

By default a context only grows. A chat template or a context-window policy may instead
rewrite what came before; each rewritten history then starts a new context of the same
episode, in which all that is old is prompt. So every sampled token is an ACTION token
exactly once, in the context in which it was sampled.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxagent.data.kinds import Kind
from jaxagent.episodes.engine import Generation
from jaxagent.episodes.episode import Context


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


@dataclass(frozen=True)
class Exchange:
    """A past turn: what was sampled, and all that was fed after it (scaffolding included)."""

    action: tuple[int, ...]
    answer: tuple[int, ...]


# (prompt, past turns, max_context_tokens) -> all that the next turn is conditioned on. It must
# end where the policy's turn begins. The history as it is means: append, no new context.
Rewrite = Callable[[Sequence[int], Sequence[Exchange], int], list[int]]


def whole_history(prompt: Sequence[int], past: Sequence[Exchange]) -> list[int]:
    """The history as it is."""
    return [*prompt, *(token for turn in past for token in (*turn.action, *turn.answer))]


def drop_oldest_turns(reserve: int) -> Rewrite:
    """Forgets the oldest turns once fewer than ``reserve`` tokens are left for the next one.

    It then forgets until half of the context is free, so that a new context (and the
    prefill it costs) comes once in a while and not every turn. The prompt always stays.
    """
    if reserve < 1:
        raise ValueError(f"drop_oldest_turns needs reserve >= 1, got {reserve}")

    def rewrite(prompt: Sequence[int], past: Sequence[Exchange], limit: int) -> list[int]:
        # Replayed from the start, which makes it a function of the history alone.
        first, size = 0, len(prompt)
        for number, turn in enumerate(past):
            size += len(turn.action) + len(turn.answer)
            if size + reserve > limit:
                while first < number and size > limit // 2:
                    size -= len(past[first].action) + len(past[first].answer)
                    first += 1
        return whole_history(prompt, past[first:])

    return rewrite


def rewrite_actions(change: Callable[[Sequence[int]], Sequence[int]]) -> Rewrite:
    """Shows past turns as ``change`` of the sampled tokens, for example without thoughts."""

    def rewrite(prompt: Sequence[int], past: Sequence[Exchange], limit: int) -> list[int]:
        return whole_history(
            prompt, [Exchange(tuple(change(turn.action)), turn.answer) for turn in past]
        )

    return rewrite


def context_key(key: int, number: int) -> int:
    """The sampling seed of an episode's context ``number``; the first has the episode's own.

    Draws depend on the seed and the position, so a new context needs a new seed.
    """
    if number == 0:
        return key
    digest = hashlib.blake2b(f"{key}/context/{number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
