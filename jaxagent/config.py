"""From a frozen dataclass to a command line, and to a file beside the run."""

import contextlib
import dataclasses
import io
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

C = TypeVar("C")


class ConfigError(Exception):
    """A configuration value that is unknown or impossible; one line, naming the field."""


def require(condition: bool, message: str) -> None:
    """Raises ``ConfigError(message)`` unless ``condition`` holds; for ``__post_init__``."""
    if not condition:
        raise ConfigError(message)


def parse(default: C, args: Sequence[str] | None = None, *, description: str | None = None) -> C:
    """Reads the command line into a config of the type of ``default``.

    ``--help`` documents every field (from its docstring) with its default. An unknown or
    impossible value ends the program with status 2 and one clear line on stderr.

    Args:
      default: a frozen dataclass instance holding the defaults.
      args: the arguments; ``sys.argv[1:]`` when None.
      description: shown by ``--help``; the class docstring when None.
    """
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(
                type(default),
                default=default,
                args=args,
                description=description,
                config=(tyro.conf.FlagConversionOff,),
            )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except SystemExit as stop:
        if stop.code not in (0, None):
            print(
                f"error: {_one_line(errors.getvalue())} (--help lists the options)", file=sys.stderr
            )
        raise


def _one_line(text: str) -> str:
    """The words of a boxed error message, without its frame and its pointer to --help."""
    body = text.split("For full helptext")[0]
    return " ".join(re.sub(r"[\u2500-\u257f|]|-{4,}", " ", body).split())


def to_dict(config: Any) -> dict[str, Any]:
    """The resolved values of a config dataclass, nested, as JSON types."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    return plain


def save(config: Any, path: Path) -> None:
    """Writes the resolved config as JSON; the file is replaced in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(to_dict(config), indent=2) + "\n")
    temporary.replace(path)
