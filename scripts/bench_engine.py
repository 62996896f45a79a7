"""Tokens per second of the rollout engine beside Hugging Face ``generate`` on the CPU.

Both sample the same random-weight Qwen3 architecture (float32, temperature 1, no
truncation) from the same distinct random prompts, one after the other in one run:
    python scripts/bench_engine.py --json bench_engine.json
Needs torch and transformers (the ``bench`` extra). Every time includes the prefill.
"""

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxagent.models.config import ModelConfig
from jaxagent.models.sharding import make_mesh
from jaxagent.models.transformer import init
from jaxagent.rollout.engine import Engine, EngineConfig, SamplingConfig

CONFIG = ModelConfig(
    vocab_size=32000,
    hidden_size=512,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    mlp_size=1536,
    rope_theta=1e6,
    qk_norm=True,
    tie_embeddings=True,
    max_len=4096,
)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2, help="best of so many runs, both sides")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only-ours", action="store_true", help="leave the peer out")
    parser.add_argument("--devices", type=int, help="CPU devices to split the model over")
    options = parser.parse_args()
    # One device runs a decode step's small products on one thread; two run them side by side.
    jax.config.update("jax_num_cpu_devices", options.devices or options.threads)
    results: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "threads": options.threads,
        "parameters": CONFIG.num_params,
        "prompt": options.prompt,
        "new_tokens": options.new,
    }
    for batch in options.batch:
        prompts = np.random.default_rng(batch).integers(
            0, CONFIG.vocab_size, (batch, options.prompt)
        )
        seconds = ours(prompts, options.new, options.repeats)
        tokens = batch * options.new
        results[f"ours_tokens_per_s_batch{batch}"] = tokens / seconds
        if not options.only_ours:
            peer = huggingface(prompts, options.new, options.repeats, options.threads)
            results[f"hf_tokens_per_s_batch{batch}"] = tokens / peer
            results[f"ratio_batch{batch}"] = peer / seconds
        print(json.dumps(results, indent=1), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def ours(prompts: np.ndarray, new: int, repeats: int) -> float:
    """Return the seconds that the engine takes; each prompt is a session of its own."""
    batch, length = prompts.shape
    total = length + new
    config = EngineConfig(
        slots=batch,
        max_len=total,
        prefill_buckets=(length,),
        prefill_rows=(min(batch, 8),),
        context_buckets=(*range(length + 64, total, 64), total),
        decode_block=32,
    )
    sampling = SamplingConfig(max_new_tokens=new)
    mesh = make_mesh(tensor=jax.device_count())
    with Engine(init(jax.random.key(0), CONFIG), CONFIG, config, mesh=mesh) as engine:
        engine.warmup()
        best = float("inf")
        for repeat in range(repeats):
            sessions = [engine.open_session(repeat * batch + i) for i in range(batch)]
            began = time.perf_counter()
            futures = [
                session.generate(prompt.tolist(), sampling)
                for session, prompt in zip(sessions, prompts, strict=True)
            ]
            drawn = sum(len(future.result().tokens) for future in futures)
            best = min(best, time.perf_counter() - began)
            if drawn != batch * new:
                raise RuntimeError(f"drew {drawn} tokens, expected {batch * new}")
            for session in sessions:
                session.close()
        stats = engine.stats()
    late = stats["compilations"] - stats["compilations_in_warmup"]
    if late:
        raise RuntimeError(f"{late} compilations after the warm-up")
    return best


def huggingface(prompts: np.ndarray, new: int, repeats: int, threads: int) -> float:
    """Return the seconds that ``generate`` takes for the same work."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=CONFIG.vocab_size,
            hidden_size=CONFIG.hidden_size,
            num_hidden_layers=CONFIG.num_layers,
            num_attention_heads=CONFIG.num_heads,
            num_key_value_heads=CONFIG.num_kv_heads,
            head_dim=CONFIG.head_dim,
            intermediate_size=CONFIG.mlp_size,
            rope_theta=CONFIG.rope_theta,
            tie_word_embeddings=True,
            max_position_embeddings=CONFIG.max_len,
        )
    ).eval()
    count = sum(p.numel() for p in model.parameters())
    if count != CONFIG.num_params:
        raise RuntimeError(f"the peer has {count} parameters, ours {CONFIG.num_params}")
    tokens = torch.from_numpy(prompts)
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    settings |= {"min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0}
    best = float("inf")
    with torch.inference_mode():
        mask = torch.ones_like(tokens)
        model.generate(
            tokens, attention_mask=mask, **settings | {"max_new_tokens": 4, "min_new_tokens": 4}
        )
        for _ in range(repeats):
            began = time.perf_counter()
            out = model.generate(tokens, attention_mask=mask, **settings)
            best = min(best, time.perf_counter() - began)
            if out.shape[1] != prompts.shape[1] + new:
                raise RuntimeError(f"the peer returned shape {tuple(out.shape)}")
    return best


if __name__ == "__main__":
    main()
