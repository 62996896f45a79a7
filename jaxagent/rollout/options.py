"""Static shapes of the engine."""

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class EngineConfig:
    """What the engine compiles for.

    ``slots`` sequences of at most ``max_len`` tokens (prompt, observations and drawn tokens)
    are sampled at once, ``decode_block`` tokens between two looks at the host. Prefill runs
    in calls of ``prefill_rows`` sessions by ``prefill_buckets`` tokens, of at most
    ``prefill_tokens`` together. The cache is as long as the longest sequence needs, in steps
    of ``context_buckets``. Empty buckets mean: (32, 128, 512) and doubling from 256, each as
    far as ``max_len`` allows. ``max_stop_tokens`` bounds a call's stop tokens.

    Each context bucket compiles one decode and one prefill program for each bucket and row
    count, so fewer buckets warm up faster. ``refresh_after_swap`` prefills a session anew on
    the first turn after new weights arrived, so that its cache never mixes versions.
    """

    slots: int
    max_len: int
    prefill_buckets: tuple[int, ...] = ()
    decode_block: int = 16
    context_buckets: tuple[int, ...] = ()
    prefill_rows: tuple[int, ...] = (1, 8)
    prefill_tokens: int = 2048
    max_stop_tokens: int = 8
    refresh_after_swap: bool = False

    def __post_init__(self) -> None:
        for name in ("slots", "decode_block", "prefill_tokens", "max_stop_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"EngineConfig.{name} must be at least 1, got {self!r}")
        if self.max_len < 2:
            raise ValueError(f"EngineConfig.max_len must be at least 2, got {self.max_len}")
        for name in ("prefill_buckets", "context_buckets", "prefill_rows"):
            values = getattr(self, name)
            if any(value < 1 for value in values) or any(a >= b for a, b in pairwise(values)):
                raise ValueError(f"EngineConfig.{name} must be positive and ascending: {values}")
        if not self.prefill_rows:
            raise ValueError("EngineConfig.prefill_rows must name at least one row count")
        if self.context_buckets and self.context_buckets[-1] != self.max_len:
            raise ValueError(
                f"EngineConfig.context_buckets must end at max_len={self.max_len}, "
                f"got {self.context_buckets}"
            )
        shortest = self.context_lengths[0]
        if max(self.decode_block, self.prefill_lengths[-1]) > shortest:
            raise ValueError(
                f"EngineConfig: decode_block={self.decode_block} and "
                f"prefill_buckets={self.prefill_lengths} must not exceed the shortest context "
                f"bucket, {shortest}"
            )

    @property
    def prefill_lengths(self) -> tuple[int, ...]:
        """The prefill buckets in use."""
        if self.prefill_buckets:
            return self.prefill_buckets
        return tuple(n for n in (32, 128, 512) if n <= self.max_len) or (self.max_len,)

    @property
    def context_lengths(self) -> tuple[int, ...]:
        """The cache lengths in use, ``max_len`` last."""
        if self.context_buckets:
            return self.context_buckets
        length = max(256, self.prefill_lengths[-1], self.decode_block)
        lengths = []
        while length < self.max_len:
            lengths.append(length)
            length *= 2
        return (*lengths, self.max_len)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """The prefill row counts in use: never more than there are slots."""
        return tuple(n for n in self.prefill_rows if n <= self.slots) or (self.slots,)
