"""Counters of the engine."""

from dataclasses import asdict, dataclass


@dataclass
class Stats:
    """Totals since the engine started; the engine's thread writes them, anyone may read.

    ``tokens`` were drawn; ``prefill_tokens`` were prefilled, ``prefill_padded`` the same with
    padding. ``device_seconds`` is time with work to do, ``idle_seconds`` time in which open
    sessions all waited for something else (their terminals), ``empty_seconds`` time without
    any session. ``row_blocks`` counts rows that took part in ``blocks``. Compilations after
    the warm-up are ``compilations - compilations_in_warmup``: none, if all is well.
    """

    tokens: int = 0
    prefill_tokens: int = 0
    prefill_padded: int = 0
    prefill_calls: int = 0
    blocks: int = 0
    row_blocks: int = 0
    copies: int = 0
    evictions: int = 0
    resizes: int = 0
    swaps: int = 0
    version: int = 0
    compilations: int = 0
    compilations_in_warmup: int = 0
    device_seconds: float = 0.0
    idle_seconds: float = 0.0
    empty_seconds: float = 0.0

    def waited(self, seconds: float, sessions_open: bool) -> None:
        """Count time with nothing to run."""
        if sessions_open:
            self.idle_seconds += seconds
        else:
            self.empty_seconds += seconds

    def prefilled(self, tokens: int, padded: int) -> None:
        """Count one prefill call."""
        self.prefill_calls += 1
        self.prefill_tokens += tokens
        self.prefill_padded += padded

    def rows(self, tokens: int, rows: int) -> None:
        """Count what one block drew."""
        self.tokens += tokens
        self.row_blocks += rows

    def as_dict(self) -> dict[str, float]:
        """Return the counters by name."""
        return asdict(self)
