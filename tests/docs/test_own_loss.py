"""The page on writing a loss: its code runs, in order, and its errors are the real ones."""

import ast
import re
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from tests.docs.pages import fences, read

PAGE = fences(read("own_loss.md"))
CODE = [code for language, code in PAGE if language == "python"]
LINES = 10


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """Compiles without most of XLA's optimisations: many programs, each run a few times."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def names(quick_compilation: None) -> dict[str, Any]:
    """What the page's blocks define, each run once; those shown with an error must raise it."""
    found: dict[str, Any] = {}
    following = [*PAGE[1:], ("", "")]
    for (language, code), (after, shown) in zip(PAGE, following, strict=True):
        if language != "python":
            continue
        block = compile(code, "own_loss.md", "exec")
        if after == "text":
            message = raised(block, found)
            assert re.fullmatch(pattern(shown.strip()), message), f"{code}\n{message}"
        else:
            exec(block, found)
    return found


def raised(block: Any, names: dict[str, Any]) -> str:
    try:
        exec(block, names)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def pattern(shown: str) -> str:
    """``...`` stands for any text, except where it belongs to the message."""
    return ".+".join(re.escape(part) for part in shown.split("..."))


def functions() -> dict[str, ast.FunctionDef]:
    return {
        node.name: node
        for code in CODE
        for node in ast.parse(code).body
        if isinstance(node, ast.FunctionDef)
    }


def test_the_page_runs_and_its_errors_are_real(names: dict[str, Any]) -> None:
    assert {"stay_close", "fade", "history", "doubled"} <= set(names)


def test_the_loss_and_the_credit_take_ten_lines_at_the_most() -> None:
    found = functions()
    for name in ("stay_close", "stay_close_to_reference", "close_tokens", "fade", "by_weight"):
        node = found[name]
        assert node.end_lineno is not None
        assert node.end_lineno - node.lineno + 1 <= LINES, name
    (loss,) = [node for node in found.values() if node.name == "stay_close"]
    assert [argument.arg for argument in loss.args.args] == ["outputs", "batch"]
    assert isinstance(loss.body[-1], ast.Return) and isinstance(loss.body[-1].value, ast.Tuple)
    assert len(loss.body[-1].value.elts) == 3


def test_the_page_checks_what_it_claims() -> None:
    """Every loss and credit of the page is tried, and gradients are compared twice."""
    text = "\n".join(CODE)
    assert text.count("central_differences(value, logprobs)") == 2
    for name in ("stay_close", "to_reference", "trusted", "fade", "weighted"):
        assert len(re.findall(rf"\b{name}\b", text)) > 1, name


def test_the_page_shows_the_errors_of_every_part() -> None:
    shown = [text for language, text in PAGE if language == "text"]
    assert len(shown) > 10
    assert all(re.match(r"(TypeError|ValueError): ", text) for text in shown)
