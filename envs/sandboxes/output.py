"""Keeps the head and the tail of a stream in bounded memory."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kept:
    """Decoded text; ``cut_bytes`` bytes are missing at index ``cut_at`` of it."""

    text: str
    cut_at: int = 0
    cut_bytes: int = 0


class OutputBuffer:
    """The first and last ``limit / 2`` bytes of what is fed to it.

    Bytes are decoded once, at the end, so that a character split over two reads is whole;
    a character split by the cut itself is counted as left out.
    """

    def __init__(self, limit: int) -> None:
        if limit < 2:
            raise ValueError(f"max_output_bytes={limit}: at least 2 bytes are needed")
        self._head_limit = limit - limit // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    def feed(self, data: bytes) -> None:
        self._total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data:
            return
        if len(data) >= self._tail_limit:
            self._tail[:] = data[-self._tail_limit :]
        else:
            self._tail += data
            # Trimmed only when doubled, so that feeding stays linear in the data.
            if len(self._tail) > 2 * self._tail_limit:
                del self._tail[: -self._tail_limit]

    def kept(self) -> Kept:
        """What was kept so far, decoded as UTF-8 with invalid bytes replaced."""
        tail = bytes(self._tail[-self._tail_limit :])
        if self._total <= len(self._head) + len(tail):
            return Kept((bytes(self._head) + tail).decode("utf-8", "replace"))
        head = _without_partial_end(bytes(self._head))
        tail = _without_partial_start(tail)
        text = head.decode("utf-8", "replace")
        cut = self._total - len(head) - len(tail)
        return Kept(text + tail.decode("utf-8", "replace"), len(text), cut)


def _without_partial_end(data: bytes) -> bytes:
    """Drops an incomplete UTF-8 sequence at the end."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            return data
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-back] if back < needed else data
    return data


def _without_partial_start(data: bytes) -> bytes:
    """Drops up to three continuation bytes at the start."""
    start = 0
    while start < min(3, len(data)) and 0x80 <= data[start] < 0xC0:
        start += 1
    return data[start:]
