"""Speed and memory of the learner's update on a 41 M-parameter model, beside PyTorch's.

One run measures in turns, so that a machine's drift hits all alike: the float32 matrix
multiplication rate; our GRPO update; the same with the observation-prediction term; and the
same GRPO step in PyTorch (transformers' Qwen3 with random weights, sdpa). Each runs in a
process of its own, whose peak memory is reported. The environment needs jaxagent, torch and
transformers.

    python scripts/bench_learner.py --json learner.json
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 32000, 512, 8, 8, 4, 64, 1536
LENGTH = 512
RATE, CLIP, GRAD_NORM = 1e-4, 0.2, 1.0

Step = Callable[[], None]


def token_arrays(rows: int) -> dict[str, Any]:
    """Two episodes a row, each a prompt of 64 tokens, then turns of 48 action + 16 observation."""
    import numpy as np

    rng = np.random.default_rng(0)
    half = LENGTH // 2
    at = np.arange(LENGTH) % half
    turn = np.where(at < 64, -1, (at - 64) // 64)
    action = (turn >= 0) & ((at - 64) % 64 < 48)
    return {
        "tokens": rng.integers(0, VOCAB, (rows, LENGTH)).astype(np.int32),
        "positions": np.tile(at, (rows, 1)).astype(np.int32),
        "segment_ids": np.tile(1 + np.arange(LENGTH) // half, (rows, 1)).astype(np.int32),
        "turn_ids": np.tile(turn, (rows, 1)).astype(np.int32),
        "action": np.tile(action, (rows, 1)),
        "behavior_logprobs": (-10.4 + 0.2 * rng.random((rows, LENGTH))).astype(np.float32),
        "advantages": rng.normal(size=(rows, LENGTH)).astype(np.float32),
    }


def our_step(rows: int, observation: bool) -> tuple[Step, dict[str, Any]]:
    import jax
    import numpy as np

    from jaxagent.data.batch import Batch
    from jaxagent.data.kinds import Kind
    from jaxagent.losses.base import combine
    from jaxagent.losses.observation import observation_prediction
    from jaxagent.losses.policy import clipped_policy_gradient
    from jaxagent.models.config import ModelConfig
    from jaxagent.models.transformer import init
    from jaxagent.training.optimizer import adamw
    from jaxagent.training.state import create_state
    from jaxagent.training.step import make_update

    config = ModelConfig(
        VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP, qk_norm=True, remat="dots"
    )
    terms: dict[str, Any] = {"policy": (1.0, clipped_policy_gradient(CLIP, CLIP))}
    if observation:
        terms["world"] = (0.05, observation_prediction())
    optimizer = adamw(RATE, max_grad_norm=GRAD_NORM)
    update = make_update(config, combine(**terms), optimizer)
    state = create_state(init(jax.random.key(0), config), optimizer)

    a = token_arrays(rows)
    kind = np.where(a["action"], Kind.ACTION, Kind.OBSERVATION)
    kind = np.where(a["turn_ids"] < 0, Kind.PROMPT, kind)
    episodes = 2 * rows
    batch = jax.device_put(
        Batch(
            tokens=a["tokens"],
            positions=a["positions"],
            segment_ids=a["segment_ids"],
            episode_ids=(2 * np.arange(rows)[:, None] + a["segment_ids"] - 1).astype(np.int32),
            kind=kind.astype(np.uint8),
            turn_ids=a["turn_ids"],
            behavior_logprobs=np.where(a["action"], a["behavior_logprobs"], 0.0),
            policy_versions=np.where(a["action"], 0, -1).astype(np.int32),
            advantages=np.where(a["action"], a["advantages"], 0.0),
            rewards=np.ones(episodes, np.float32),
            valid=np.ones(episodes, bool),
            truncated=np.zeros(episodes, bool),
            group_ids=np.arange(episodes, dtype=np.int32) // 2,
            versions=np.zeros(episodes, np.int32),
            turn_rewards=np.zeros((episodes, 3), np.float32),
        )
    )
    # The update's own step, compiled by hand for its memory analysis.
    compiled = jax.jit(update._step, donate_argnums=0).lower(state, batch, {}).compile()
    analysis: Any = compiled.memory_analysis()
    facts = {
        "parameters": config.num_params,
        "temporary_mb": analysis.temp_size_in_bytes / 1e6,
        "state_and_batch_mb": analysis.argument_size_in_bytes / 1e6,
        "full_logits_mb": rows * LENGTH * VOCAB * 4 / 1e6,
    }

    def step() -> None:
        nonlocal state
        state, metrics = compiled(state, batch, {})
        jax.block_until_ready((state, metrics))

    return step, facts


def torch_step(rows: int) -> tuple[Step, dict[str, Any]]:
    import torch
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=MLP,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).float().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    a = {name: torch.from_numpy(x) for name, x in token_arrays(rows).items()}
    # Each episode as a row of its own: what a framework without packing does, and less
    # attention than our packed rows compute.
    half = LENGTH // 2
    a = {name: x.reshape(2 * rows, half) for name, x in a.items()}
    mask = a["action"][:, 1:]

    def step() -> None:
        logits = model(input_ids=a["tokens"].long()).logits[:, :-1]
        logprobs = -torch.nn.functional.cross_entropy(
            logits.reshape(-1, VOCAB), a["tokens"][:, 1:].long().reshape(-1), reduction="none"
        ).reshape(mask.shape)
        ratio = torch.exp((logprobs - a["behavior_logprobs"][:, 1:]).clamp(-20, 20))
        gain = a["advantages"][:, 1:]
        losses = torch.maximum(-gain * ratio, -gain * ratio.clamp(1 - CLIP, 1 + CLIP))
        loss = torch.where(mask, losses, 0.0).sum() / mask.sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_NORM)
        optimizer.step()

    return step, {"parameters": sum(p.numel() for p in model.parameters())}


def matmul_step() -> tuple[Callable[[], float], dict[str, Any]]:
    """The best float32 rate (FLOP/s) over jax and torch, square and model-shaped products."""
    import jax
    import numpy as np
    import torch

    product = jax.jit(lambda x, y: x @ y)
    shapes = [(2048, 2048, 2048), (2048, 512, 1536), (4096, 512, 512)]

    def rate() -> float:
        best = 0.0
        for m, k, n in shapes:
            x = np.random.default_rng(0).normal(size=(m, k)).astype(np.float32)
            y = np.random.default_rng(1).normal(size=(k, n)).astype(np.float32)
            jax_pair, torch_pair = jax.device_put((x, y)), (torch.tensor(x), torch.tensor(y))
            for run in (
                lambda pair=jax_pair: product(*pair).block_until_ready(),
                lambda pair=torch_pair: pair[0] @ pair[1],
            ):
                run()
                for _ in range(3):
                    start = time.perf_counter()
                    run()
                    best = max(best, 2 * m * k * n / (time.perf_counter() - start))
        return best

    return rate, {}


def worker(part: str, rows: int) -> None:
    """Serve one measurement a line of stdin: the machine's rate, or a step's seconds."""
    if part == "matmul":
        measure, facts = matmul_step()
    else:
        step, facts = (
            torch_step(rows) if part == "torch" else our_step(rows, part == "ours_observation")
        )
        step()

        def measure() -> float:
            start = time.perf_counter()
            step()
            return time.perf_counter() - start

    print(json.dumps(facts), flush=True)
    for _ in sys.stdin:
        value = measure()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(json.dumps({"value": value, "peak_rss_mb": peak}), flush=True)


def run(rows: int, rounds: int) -> dict[str, Any]:
    """Start a process for each part, let them take turns, and compare."""
    parts = ("matmul", "ours", "ours_observation", "torch")
    workers: dict[str, subprocess.Popen[str]] = {}
    facts: dict[str, Any] = {}
    values: dict[str, list[float]] = {part: [] for part in parts}
    peaks: dict[str, float] = {}
    try:
        for part in parts:
            workers[part] = subprocess.Popen(
                [sys.executable, __file__, "--part", part, "--rows", str(rows)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            facts[part] = _read(workers[part], part)
        for _ in range(rounds):
            for part in parts:
                pipe = workers[part].stdin
                assert pipe is not None
                pipe.write("\n")
                pipe.flush()
                answer = _read(workers[part], part)
                values[part].append(answer["value"])
                peaks[part] = answer["peak_rss_mb"]
    finally:
        for process in workers.values():
            process.kill()
            process.wait()
    return _report(rows, facts, values, peaks)


def _read(process: "subprocess.Popen[str]", part: str) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"the {part} process ended early; its error is above")
    found: dict[str, Any] = json.loads(line)
    return found


def _report(
    rows: int,
    facts: dict[str, Any],
    values: dict[str, list[float]],
    peaks: dict[str, float],
) -> dict[str, Any]:
    seconds = {part: min(times) for part, times in values.items() if part != "matmul"}
    peak_rate = max(values["matmul"])
    tokens = rows * LENGTH
    ours = facts["ours"]
    useful = 6 * ours["parameters"] * tokens
    return {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "parameters": ours["parameters"],
        "rows": rows,
        "tokens": tokens,
        "matmul_gflops": peak_rate / 1e9,
        "step_seconds": seconds,
        "step_seconds_median": {part: statistics.median(values[part]) for part in seconds},
        "step_seconds_all": {part: values[part] for part in seconds},
        "tokens_per_second": {part: tokens / s for part, s in seconds.items()},
        "useful_gflops": useful / seconds["ours"] / 1e9,
        "useful_share_of_matmul": useful / seconds["ours"] / peak_rate,
        "useful_share_of_matmul_torch": useful / seconds["torch"] / peak_rate,
        "speed_ratio_ours_over_torch": seconds["torch"] / seconds["ours"],
        "time_ratio_with_observation_over_without": seconds["ours_observation"] / seconds["ours"],
        "peak_memory_ratio_ours_over_torch": peaks["ours"] / peaks["torch"],
        "peak_rss_mb": {part: peaks[part] for part in seconds},
        "compiled_memory_mb": {k: v for k, v in ours.items() if k.endswith("_mb")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Benchmark the learner's update.")
    parser.add_argument("--json", help="write the figures to this file too")
    parser.add_argument("--rows", type=int, default=4, help="rows of 512 tokens in a batch")
    parser.add_argument("--rounds", type=int, default=5, help="measurements; the best one counts")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        worker(arguments.part, arguments.rows)
        return
    text = json.dumps(run(arguments.rows, arguments.rounds), indent=2)
    print(text)
    if arguments.json:
        with open(arguments.json, "w") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
