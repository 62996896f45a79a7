"""The study's bookkeeping: what is run, what is skipped, and how means and bands are made."""

import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    import study

    return study


def test_every_run_starts_from_the_same_warm_start_and_is_run_once(
    study: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[list[str]] = []

    def fake(command: list[str]) -> Any:
        commands.append(command[1:])
        out = Path(command[command.index("--out") + 1])
        out.mkdir(parents=True)
        (out / "summary.json").write_text("{}")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(study.subprocess, "run", fake)
    monkeypatch.setattr(study.comparison, "write", lambda *a: None)
    config = study.Config(
        out=tmp_path, methods=("grpo", "world-weak", "rloo"), seeds=(0, 1), steps=5
    )
    study.main(config)
    assert len(commands) == 2 * (3 + 2)  # three methods, two warm starts a seed
    starts = {c[c.index("--start") + 1] for c in commands if "--start" in c}
    assert starts == {str(tmp_path / k / f"seed{s}") for k in ("start", "weak") for s in (0, 1)}
    weak = [c for c in commands if "--warm.steps" in c]
    assert len(weak) == 2 and all("weak" in c[c.index("--out") + 1] for c in weak)
    assert all(c[c.index("--rl.steps") + 1] == "5" for c in commands if "--start" in c)
    study.main(config)
    assert len(commands) == 10

    (tmp_path / "rloo" / "seed1" / "summary.json").unlink()
    (tmp_path / "rloo" / "seed1" / "warm_start").mkdir()
    (tmp_path / "rloo" / "seed1" / "config.json").touch()
    monkeypatch.setattr(
        study.subprocess, "run", lambda c: commands.append(c) or subprocess.CompletedProcess(c, 1)
    )
    with pytest.raises(RuntimeError, match="go on from there"):
        study.main(config)
    assert commands[-1][-2:] == ["--resume", "True"]


def test_means_have_students_interval(study: ModuleType) -> None:
    found = study.comparison.mean_over_seeds([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    np.testing.assert_allclose(found.half, 4.302653 / math.sqrt(3), rtol=1e-5)
    assert math.isnan(study.comparison.mean_over_seeds([1.0]).half)


def test_unknown_methods_are_one_line() -> None:
    command = [sys.executable, str(EXPERIMENTS / "study.py"), "--methods", "magic"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "unknown magic" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
