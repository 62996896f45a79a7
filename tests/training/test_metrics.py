import ast
import asyncio
import json
import re
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.data.kinds import Kind
from jaxagent.episodes.episode import Context, Episode
from jaxagent.episodes.groups import Group
from jaxagent.episodes.loop import Collected
from jaxagent.rollout.stats import Stats
from jaxagent.training import metrics as metrics_module
from jaxagent.training.metric_names import (
    METRICS,
    Metric,
    UnknownMetricError,
    find_metric,
    metrics_markdown,
)
from jaxagent.training.metrics import (
    MetricsWriter,
    engine_metrics,
    episode_metrics,
    read_metrics,
)

ROOT = Path(__file__).parents[2]


def episode(reward, *, actions=4, turns=2, version=3, **rest):
    kinds = [Kind.PROMPT] * 3 + ([Kind.ACTION] * actions + [Kind.OBSERVATION] * 5) * turns
    turn_ids = [-1] * 3 + [t for t in range(turns) for _ in range(actions + 5)]
    array = np.asarray(kinds, np.uint8)
    context = Context(
        np.zeros(len(array), np.int32),
        array,
        np.asarray(turn_ids, np.int32),
        np.zeros(len(array), np.float32),
        np.where(array == Kind.ACTION, version, -1).astype(np.int32),
    )
    return Episode("t", "g", (context,), reward, **rest)


def test_episode_metrics():
    groups = (
        Group(0, "a", "0:a", (episode(1.0), episode(0.0, truncated="turns", version=1))),
        Group(1, "b", "1:b", (episode(1.0), episode(1.0, turns=4))),
        Group(2, "c", "2:c", (episode(0.5, info={"malformed": 2, "finished": "done"}),) * 2),
        Group(
            3,
            "d",
            "3:d",
            (episode(0.0, actions=0, truncated="time"), episode(0.0, valid=False, version=0)),
        ),
    )
    counts = {"episodes/invalid/OSError": 1, "episodes/invalid/E": 2, "groups/dropped_stale": 4}
    found = episode_metrics(Collected(groups, 3, counts, 0.5), version=4)
    expected = {
        "episodes/valid": 7,
        "episodes/success": 3 / 7,
        "episodes/reward_mean": 4 / 7,
        "episodes/reward_std": np.std([1, 0, 1, 1, 0.5, 0.5, 0]),
        "episodes/invalid": 3,
        "episodes/invalid/OSError": 1,
        "episodes/truncated": 2 / 7,
        "episodes/truncated/turns": 1 / 7,
        "episodes/truncated/time": 1 / 7,
        "episodes/declared_done": 2 / 7,
        "episodes/malformed": 4 / (2 * 6 + 4),
        "episodes/empty": 1,
        "episodes/turns_mean": 16 / 7,
        "episodes/turns_max": 4,
        "episodes/action_tokens_mean": 4 * 14 / 7,
        "episodes/observation_tokens_mean": 5 * 16 / 7,
        "episodes/tokens_max": 3 + 9 * 4,
        "groups/count": 4,
        "groups/no_signal": 3,
        "groups/solved": 1,
        "groups/unsolved": 2,
        "groups/staleness_mean": (3 + 1 + 1 + 0) / 4,
        "groups/staleness_max": 3,
        "groups/dropped_stale": 4,
        "groups/started": 0,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    for name in found:
        find_metric(name)


def test_no_episode_gives_zeros_never_nan():
    found = episode_metrics(Collected((), 0, {}, 0.0))
    assert set(found.values()) == {0.0}


def test_engine_metrics_are_named_and_count_from_the_warm_up():
    stats = Stats(tokens=5, copies=2, compilations=7, compilations_in_warmup=6).as_dict()
    found = engine_metrics(stats)
    assert (found["engine/tokens"], found["engine/copies"]) == (5, 2)
    assert found["engine/compilations"] == 1
    for name in found:
        find_metric(name)


def test_docs_page_is_the_table():
    assert (ROOT / "docs/metrics.md").read_text() == metrics_markdown(), (
        "run: python -m jaxagent.training.metric_names > docs/metrics.md"
    )


def test_names_in_the_code_are_in_the_table():
    """Every literal ``"section/name"`` key of a metrics dictionary has its entry."""
    sections = {name.split("/")[0] for name in METRICS if "/" in name} - {"<term>"}
    found = set()
    for path in (ROOT / "jaxagent").rglob("*.py"):
        for name in re.findall(r'"([a-z_]+/[a-z_0-9/]*[a-z_0-9])"', path.read_text()):
            if name.split("/")[0] in sections:
                found.add(name)
    assert len(found) > 40
    for name in sorted(found):
        find_metric(name)


def test_metrics_of_losses_are_in_the_table():
    """Every literal key that a loss puts in its ``metrics`` has its ``<term>/...`` entry."""
    found = set()
    for path in (ROOT / "jaxagent/losses").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Assign):
                continue
            (target,) = node.targets
            keys = []
            if isinstance(target, ast.Name) and isinstance(node.value, ast.Dict):
                keys = node.value.keys if target.id == "metrics" else []
            elif isinstance(target, ast.Subscript) and ast.unparse(target.value) == "metrics":
                keys = [target.slice]
            found |= {key.value for key in keys if isinstance(key, ast.Constant)}
    assert {"clip_fraction", "dual_clip_fraction", "k1"} <= found
    for name in sorted(found - {"loss"}):
        assert f"<term>/{name}" in METRICS, f"add <term>/{name} to METRICS"


def test_unknown_names_fail_with_a_hint(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        with pytest.raises(UnknownMetricError, match=r"'episodes/sucess' .*'episodes/success'"):
            writer.write(0, {"episodes/sucess": 1.0})
        with pytest.raises(UnknownMetricError, match="unknown metric"):
            writer.write(0, {"episodes/invalid/<cause>": 1.0})
        with pytest.raises(ValueError, match=r"'loss' must be a scalar, got shape \(2,\)"):
            writer.write(0, {"loss": jnp.zeros(2)})
        writer.write(
            0, {"policy/clip_fraction": 1, "custom/mine": 2, "episodes/invalid/OSError": 3}
        )
    assert read_metrics(tmp_path)[0].keys() >= {"policy/clip_fraction", "custom/mine"}
    with MetricsWriter(tmp_path, extra={"mine/<x>": Metric("my number", "1")}) as writer:
        writer.write(1, {"mine/a": 1.0})
    assert read_metrics(tmp_path)[1]["mine/a"] == 1.0


def test_values_of_every_kind_read_back(tmp_path):
    values = {
        "loss": jnp.float32(0.1),
        "episodes/valid": 3,
        "time/step": np.float64(0.25),
        "policy/loss": float("nan"),
        "policy/ratio_max": jnp.inf,
    }
    with MetricsWriter(tmp_path, interval=1) as writer:
        writer.write(7, values)
        writer.write(7, {"eval/success": 0.5})
        writer.write(5, {"loss": -jnp.inf})
        writer.flush()
        found = read_metrics(tmp_path)
    assert list(found) == [5, 7] and found[5]["loss"] == -np.inf
    row = found[7]
    assert row["loss"] == np.float32(0.1) and row["time/step"] == 0.25
    assert np.isnan(row["policy/loss"]) and row["policy/ratio_max"] == np.inf
    assert row["eval/success"] == 0.5 and row["time"] > 1e9
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_device_values_are_fetched_once_an_interval_off_the_callers_thread(tmp_path, monkeypatch):
    import threading

    fetches = []
    real = metrics_module.jax.device_get

    def spy(values):
        fetches.append((len(values), threading.current_thread().name))
        return real(values)

    monkeypatch.setattr(metrics_module.jax, "device_get", spy)
    with MetricsWriter(tmp_path, interval=4, seconds=1e9) as writer:
        for step in range(10):
            writer.write(step, {"loss": jnp.float32(step)})
    assert [count for count, _ in fetches] == [4, 4, 2]
    assert all(name.startswith("metrics") for _, name in fetches)
    assert [row["loss"] for row in read_metrics(tmp_path).values()] == list(range(10))


def test_slow_steps_are_written_by_the_clock(tmp_path):
    with MetricsWriter(tmp_path, interval=1000, seconds=0.0) as writer:
        writer.write(1, {"loss": 1.0})
        assert len(writer._running) == 1


def test_torn_tail_and_resumed_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"loss": 1.0})
        writer.write(2, {"loss": 2.0})
    path.write_bytes(path.read_bytes() + b'{"step": 3, "lo')
    assert list(read_metrics(path)) == [1, 2]
    with MetricsWriter(tmp_path) as writer:
        writer.write(2, {"loss": 20.0})
    assert {s: row["loss"] for s, row in read_metrics(path).items()} == {1: 1.0, 2: 20.0}
    assert path.read_bytes().count(b"\n") == 3
    with pytest.raises(FileNotFoundError, match="no metrics at"):
        read_metrics(tmp_path / "nowhere")


def test_failures_of_the_thread_surface(tmp_path, monkeypatch):
    writer = MetricsWriter(tmp_path, interval=1)
    with monkeypatch.context() as patch:
        patch.setattr(metrics_module.os, "write", lambda *args: 0)
        writer.write(1, {"loss": 1.0})
        with pytest.raises(OSError, match="disk full"):
            writer.flush()
    writer.write(2, {"loss": 2.0})
    writer.close()
    assert list(read_metrics(tmp_path)) == [2]
    with pytest.raises(RuntimeError, match="closed"):
        writer.write(3, {"loss": 1.0})


def test_tensorboard_is_written_on_request(tmp_path):
    pytest.importorskip("tensorboardX")
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        writer.write(1, {"loss": 0.5, "policy/loss": 0.25})
    (events,) = tmp_path.glob("events.out.tfevents.*")
    assert b"policy/loss" in events.read_bytes()


def test_missing_tensorboard_is_said_at_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jaxagent\[tensorboard\]'"):
        MetricsWriter(tmp_path, tensorboard=True)
    MetricsWriter(tmp_path).close()


def test_writer_may_be_used_from_a_running_event_loop(tmp_path):
    async def run():
        with MetricsWriter(tmp_path, interval=2) as writer:
            for step in range(5):
                writer.write(step, {"loss": jnp.float32(step)})
                await asyncio.sleep(0)

    asyncio.run(run())
    assert len(read_metrics(tmp_path)) == 5
