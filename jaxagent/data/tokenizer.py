"""Text to tokens and back.

Only *new* text is ever tokenised: what the policy sampled is kept as token ids, since
decoding and re-encoding is not the identity for most tokenizers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<cmd>", "</cmd>", "<done/>", "<obs>", "<note>")


class Tokenizer(Protocol):
    """What the episode loop needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def pad_id(self) -> int: ...

    @property
    def special_tokens(self) -> Sequence[str]: ...

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``. Never yields a special token, whatever the text says."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of ``tokens``; special tokens are spelled out."""
        ...

    def special(self, name: str) -> int:
        """The id of a special token. Raises KeyError when there is no such token."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes as ids 0-255, then the special tokens.

    ``special_tokens`` get the ids from 256 on; ``vocab_size`` is rounded up to a multiple of
    8 so that the unembedding has an even shape (the spare ids decode to nothing).
    """

    special_tokens: tuple[str, ...] = SPECIAL_TOKENS

    def __post_init__(self) -> None:
        if len(set(self.special_tokens)) != len(self.special_tokens):
            raise ValueError(f"special_tokens has repeated names: {self.special_tokens}")
        if "<pad>" not in self.special_tokens:
            raise ValueError("special_tokens must contain '<pad>'")

    @property
    def vocab_size(self) -> int:
        return -(-(256 + len(self.special_tokens)) // 8) * 8

    @property
    def pad_id(self) -> int:
        return self.special("<pad>")

    def special(self, name: str) -> int:
        try:
            return 256 + self.special_tokens.index(name)
        except ValueError:
            raise KeyError(
                f"no special token {name!r}; this tokenizer has {', '.join(self.special_tokens)}"
            ) from None

    def encode(self, text: str) -> list[int]:
        # A lone surrogate has no UTF-8 form; it becomes '?' rather than an exception.
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, tokens: Iterable[int]) -> str:
        pieces: list[str] = []
        run = bytearray()
        for token in tokens:
            token = int(token)
            if 0 <= token < 256:
                run.append(token)
                continue
            pieces.append(run.decode("utf-8", errors="replace"))
            run.clear()
            if 0 <= token - 256 < len(self.special_tokens):
                pieces.append(self.special_tokens[token - 256])
        pieces.append(run.decode("utf-8", errors="replace"))
        return "".join(pieces)
