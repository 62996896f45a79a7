import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxagent.data.tokenizer import ByteTokenizer

tokenizer = ByteTokenizer()


@given(st.text())
def test_round_trip(text: str) -> None:
    clean = text.encode("utf-8", "replace").decode()
    assert tokenizer.decode(tokenizer.encode(text)) == clean


@given(st.text() | st.sampled_from(["<done/>", "a</cmd>b", "<pad><bos>"]))
def test_text_never_becomes_a_special_token(text: str) -> None:
    assert all(token < 256 for token in tokenizer.encode(text))


def test_special_tokens_are_spelled_out() -> None:
    tokens = [tokenizer.special("<cmd>"), *tokenizer.encode("ls é"), tokenizer.special("</cmd>")]
    assert tokenizer.decode(tokens) == "<cmd>ls é</cmd>"
    assert tokenizer.vocab_size % 8 == 0 and tokenizer.vocab_size > max(tokens)


def test_spare_ids_and_broken_utf8() -> None:
    tok = ByteTokenizer(special_tokens=("<pad>", "<eos>"))
    assert tok.vocab_size == 264
    assert tok.decode([263]) == ""
    assert tok.decode([0xC3, tok.special("<eos>"), 0xA9]) == "\ufffd<eos>\ufffd"


def test_unknown_special_token_names_those_there_are() -> None:
    with pytest.raises(KeyError, match="<pad>"):
        tokenizer.special("<nothing>")
    with pytest.raises(ValueError, match="repeated"):
        ByteTokenizer(special_tokens=("<pad>", "<pad>"))
    with pytest.raises(ValueError, match="<pad>"):
        ByteTokenizer(special_tokens=("<eos>",))
