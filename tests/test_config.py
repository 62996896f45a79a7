import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jaxagent import config as config_lib


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    """Learning rate per update."""


@dataclass(frozen=True)
class Config:
    """A test configuration."""

    steps: int = 3
    """Number of updates."""
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        config_lib.require(self.steps > 0, f"steps must be positive, got {self.steps}")


def test_values_and_nested_values() -> None:
    parsed = config_lib.parse(Config(), ["--steps", "7", "--inner.rate", "0.25"])
    assert parsed == Config(steps=7, inner=Inner(0.25))
    assert config_lib.parse(Config(steps=9), []) == Config(steps=9)


def test_impossible_value_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        config_lib.parse(Config(), ["--steps", "0"])
    assert caught.value.code == 2
    assert "error: steps must be positive, got 0\n" in capsys.readouterr().err


def test_unknown_field_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        config_lib.parse(Config(), ["--stepz", "1"])
    assert caught.value.code == 2
    assert "stepz" in capsys.readouterr().err


def test_help_documents_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config_lib.parse(Config(), ["--help"])
    shown = capsys.readouterr().out
    assert "Number of updates." in shown and "Learning rate per update." in shown


def test_saved_config_is_json(tmp_path: Path) -> None:
    config_lib.save(Config(), tmp_path / "run" / "config.json")
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {
        "steps": 3,
        "inner": {"rate": 0.5},
    }
