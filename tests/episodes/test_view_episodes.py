import importlib.util
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from jaxagent.data.kinds import Kind
from jaxagent.episodes.episode import Episode
from jaxagent.episodes.history import ContextBuilder
from jaxagent.episodes.store import EpisodeWriter
from tests.episodes.fakes import TOKENIZER, Generation, command

SCRIPT = Path(__file__).parents[2] / "scripts/view_episodes.py"
_spec = importlib.util.spec_from_file_location("view_episodes", SCRIPT)
view = importlib.util.module_from_spec(_spec)
sys.modules["view_episodes"] = view
_spec.loader.exec_module(view)


def episode(task, reward, output="a.txt\n", **rest):
    builder = ContextBuilder()
    builder.feed([TOKENIZER.special("<bos>"), *TOKENIZER.encode("List [bold]it.")], Kind.PROMPT, -1)
    action = command("ls")
    generation = Generation(
        np.asarray(action), np.full(len(action), -0.25), np.zeros(len(action), np.int32), "x"
    )
    builder.sampled(generation, 0)
    builder.feed(TOKENIZER.encode(output), Kind.OBSERVATION, 0)
    return Episode(task, "g", (builder.build(),), reward, (reward,), **rest)


@pytest.fixture
def stored(tmp_path):
    with EpisodeWriter(tmp_path / "s") as store:
        store.append([episode("count/1", 1.0)], step=1, advantages=[0.5])
        store.append([episode("count/2", 0.0, truncated="turns")], step=2)
        failed = episode("sort/3", 0.0, valid=False, error="OSError: [red]disk")
        store.append([failed], step=2)
        store.append([episode("sort/4", 0.0, "\x1b[31mred\x07\r\n")], step=3)
        store.flush()
        yield str(tmp_path / "s")  # still being written


def shown(store, *, color=False, code=0, **options):
    output = io.StringIO()
    console = Console(file=output, width=200, color_system="standard" if color else None)
    assert view.main(view.Options(store, **options), console) == code
    return output.getvalue()


def test_prints_text_outcome_and_counts(stored):
    text = shown(stored)
    assert "<bos>List [bold]it.<cmd>ls</cmd>\na.txt" in text
    assert "reward 1  step 1 · count/1 · 1 turns" in text and "advantage +0.500" in text
    assert "INVALID OSError: [red]disk" in text and "truncated: turns" in text
    assert "4 of 4 matching episodes shown; 1 solved" in text
    assert "\x1b[1;32m<cmd>ls</cmd>" in shown(stored, color=True)


def test_terminal_codes_of_an_observation_are_shown_not_obeyed(stored):
    text = shown(stored, task="sort/4")
    assert "\\x1b[31mred\\x07\\x0d" in text
    assert not set("\x1b\x07\r") & set(text)


@pytest.mark.parametrize(
    ("options", "tasks"),
    [
        ({"solved": "yes"}, ["count/1"]),
        ({"solved": "no"}, ["count/2", "sort/4"]),
        ({"solved": "invalid"}, ["sort/3"]),
        ({"task": "sort"}, ["sort/3", "sort/4"]),
        ({"step": 2}, ["count/2", "sort/3"]),
        ({"last": 1}, ["sort/4"]),
        ({"last": 0}, ["count/1", "count/2", "sort/3", "sort/4"]),
    ],
)
def test_filters(stored, options, tasks):
    for as_list in (False, True):
        text = shown(stored, list=as_list, **options)
        assert [t for t in ("count/1", "count/2", "sort/3", "sort/4") if t in text] == tasks


def test_logprobs_on_request(stored):
    assert "<cmd>-0.25 l-0.25 s-0.25 </cmd>-0.25" in shown(stored, logprobs=True)
    assert "-0.25" not in shown(stored)


def test_missing_empty_and_unmatched_are_one_clear_line(stored, tmp_path, capsys):
    shown(str(tmp_path / "none"), code=1)
    assert "no episode store at" in capsys.readouterr().err
    with EpisodeWriter(tmp_path / "empty"):
        shown(str(tmp_path / "empty"), code=1)
    assert "holds no episode yet" in capsys.readouterr().err
    shown(stored, task="zzz", code=1)
    error = capsys.readouterr().err
    assert "none of the 4 episodes matches" in error and error.count("\n") == 1


def test_command_line(stored):
    run = subprocess.run(
        [sys.executable, str(SCRIPT), stored, "--list", "--solved", "yes"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0 and "count/1" in run.stdout, run.stderr
