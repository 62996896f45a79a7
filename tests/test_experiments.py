"""The recipes as people run them: real sandboxes, real training, on a small budget."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FAMILIES = ("make_dir", "delete_file", "set_mode", "follow_note")
TINY = (
    "--tasks.families",
    *FAMILIES,
    "--tasks.held-out",
    "16",
    "--model.hidden",
    "64",
    "--model.layers",
    "2",
    "--model.mlp",
    "64",
    "--warm.demonstrations",
    "16",
    "--warm.steps",
    "4",
    "--warm.episodes",
    "8",
    "--rl.groups",
    "2",
    "--rl.group-size",
    "4",
    "--rl.max-concurrent",
    "8",
    "--rl.evaluate-every",
    "0",
)


def start(recipe: str, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "experiments" / f"{recipe}.py"), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "120"},
    )


def finish(process: subprocess.Popen[str], seconds: float = 240) -> str:
    output, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, output
    return output


def test_quickstart_leaves_what_the_readme_promises(tmp_path: Path) -> None:
    out = tmp_path / "run"
    shown = finish(start("quickstart", "--out", str(out), *TINY, "--rl.steps", "2"))
    summary = json.loads((out / "summary.json").read_text())
    assert summary["updates"] == 2
    assert summary["episodes"] >= 16 and summary["episodes_invalid"] == 0
    assert 0 <= summary["success_before"] <= 1 and len(summary["success_after_interval"]) == 2
    assert summary["logprob_gap"] < 1e-4
    assert summary["compilations_after_warmup"] == 0
    assert set(summary["seconds"]) >= {"demonstrations", "warm start", "reinforcement"}
    assert (out / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "config.json").read_text())["run"]["rl"]["steps"] == 2
    assert shown.count("before · ") == 3 and shown.count("after · ") == 3
    assert "held-out success after (greedy)" in shown

    listed = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "view_episodes.py"), str(out / "held_out")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "make_dir" in listed.stdout


def test_stopped_run_resumes(tmp_path: Path) -> None:
    out = tmp_path / "run"
    args = ("--out", str(out), *TINY, "--rl.steps", "60", "--rl.checkpoint-every", "1000")
    process = start("echo", *args)
    deadline = time.monotonic() + 200
    while not (out / "episodes" / "index.jsonl").exists() or not (
        (out / "episodes" / "index.jsonl").read_bytes()
    ):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert "--resume True goes on" in finish(process)
    steps = [int(p.name) for p in (out / "checkpoints").iterdir() if p.name.isdigit()]
    assert steps and max(steps) < 60

    more = str(max(steps) + 1)
    shown = finish(start("echo", *args, "--rl.steps", more, "--resume", "True"))
    assert "warm start" not in shown  # it is not done again
    assert json.loads((out / "summary.json").read_text())["updates"] == int(more)


def test_an_earlier_run_is_moved_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    import pipeline
    from rich.console import Console

    out = tmp_path / "run"
    for name in ("first", "second"):
        out.mkdir()
        (out / name).touch()
        pipeline.move_aside(out, Console(quiet=True))
    assert (tmp_path / "run.1" / "first").exists() and (tmp_path / "run.2" / "second").exists()


@pytest.mark.parametrize(
    ("recipe", "args", "message"),
    [
        ("grpo", ("--tasks.families", "juggle"), "unknown juggle"),
        ("grpo", ("--start", "/nowhere"), "/nowhere holds no warm_start"),
        ("grpo", ("--out", "/nowhere", "--resume", "True"), "no run in /nowhere"),
        ("grpo", ("--rl.group-size", "1"), "rl.group_size must be at least 2"),
        ("grpo", ("--clip-low", "-1"), "clip_low must not be negative"),
        ("echo", ("--world-weight", "0", "--policy-weight", "0"), "nothing to learn from"),
    ],
)
def test_impossible_values_are_one_line(recipe: str, args: tuple[str, ...], message: str) -> None:
    process = start(recipe, *args)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert message in output and "Traceback" not in output


@pytest.mark.skipif(not os.environ.get("CI"), reason="takes minutes; set CI=1 to run it")
@pytest.mark.timeout(1800)
def test_reinforcement_beats_the_warm_start_on_held_out_tasks(tmp_path: Path) -> None:
    """Half of the quickstart's updates, otherwise as it is."""
    out = tmp_path / "run"
    finish(start("quickstart", "--out", str(out), "--rl.steps", "36"), seconds=1700)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["episodes_invalid"] <= 0.01 * summary["episodes"]
    # About 25 points are usual; the standard error of the difference is 4.
    assert summary["success_after"] - summary["success_before"] > 0.1
