"""Scheduling decisions of the engine as pure functions of host data."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Chunk:
    """Tokens to append to ``slot``, which holds ``start`` of its sequence so far."""

    slot: int
    start: int
    tokens: Sequence[int]


@dataclass(frozen=True)
class PrefillCall:
    """Arguments of one prefill: ``tokens [R, T]``, ``rows [R, 3]`` (slot, start, count)."""

    tokens: NDArray[np.int32]
    rows: NDArray[np.int32]


def bucket_for(length: int, buckets: Sequence[int]) -> int:
    """Return the smallest of the ascending ``buckets`` that holds ``length``, else the largest."""
    return next((bucket for bucket in buckets if bucket >= length), buckets[-1])


def split_rows(count: int, options: Sequence[int]) -> list[int]:
    """Cut ``count`` rows into calls of the ascending ``options`` sizes, at most half wasted.

    >>> split_rows(11, (1, 8))
    [8, 1, 1, 1]
    >>> split_rows(6, (1, 8))
    [8]
    """
    calls = []
    while count > 0:
        fits = [size for size in options if size <= count]
        above = next((size for size in options if size >= count), None)
        size = above if above is not None and (count > above // 2 or not fits) else fits[-1]
        calls.append(size)
        count -= size
    return calls


def prefill_calls(
    chunks: Sequence[Chunk], buckets: Sequence[int], rows: Sequence[int], max_tokens: int
) -> list[PrefillCall]:
    """Return the calls, in order, that append every chunk.

    A chunk longer than the largest bucket takes several calls, one after the other. Calls
    hold at most ``max_tokens`` tokens, padding included, unless one row alone exceeds it.
    """
    calls = []
    pending = [chunk for chunk in chunks if chunk.tokens]
    while pending:
        by_bucket: dict[int, list[Chunk]] = {}
        for chunk in pending:
            by_bucket.setdefault(bucket_for(len(chunk.tokens), buckets), []).append(chunk)
        pending = []
        for bucket, group in sorted(by_bucket.items()):
            options = prefill_row_options(bucket, rows, max_tokens)
            for size in split_rows(len(group), options):
                taken, group = group[:size], group[size:]
                calls.append(_call(taken, size, bucket))
                pending += [
                    Chunk(chunk.slot, chunk.start + bucket, chunk.tokens[bucket:])
                    for chunk in taken
                    if len(chunk.tokens) > bucket
                ]
    return calls


def prefill_row_options(bucket: int, rows: Sequence[int], max_tokens: int) -> list[int]:
    """Return the row counts that a bucket is compiled for."""
    return [size for size in rows if size == rows[0] or size * bucket <= max_tokens]


def _call(chunks: Sequence[Chunk], size: int, bucket: int) -> PrefillCall:
    tokens = np.zeros((size, bucket), np.int32)
    rows = np.zeros((size, 3), np.int32)
    for row, chunk in enumerate(chunks):
        part = chunk.tokens[:bucket]
        tokens[row, : len(part)] = part
        rows[row] = chunk.slot, chunk.start, len(part)
    return PrefillCall(tokens, rows)
