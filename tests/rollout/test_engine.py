"""The engine beside the training-side log-probabilities, and its scheduling."""

import threading
from concurrent.futures import CancelledError
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.compilations import compilations
from jaxagent.models.cache import init_cache
from jaxagent.models.config import ModelConfig
from jaxagent.models.heads import HeadConfig, add_heads
from jaxagent.models.logprobs import shifted_logprobs, token_logprobs
from jaxagent.models.transformer import forward, init
from jaxagent.rollout import programs
from jaxagent.rollout.engine import Engine, EngineConfig, SamplingConfig
from jaxagent.rollout.session import SessionClosedError

MAX_LEN = 64
MODEL = ModelConfig(
    vocab_size=40,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_size=48,
    qk_norm=True,
    max_len=MAX_LEN,
)
MANY = EngineConfig(
    slots=64,
    max_len=MAX_LEN,
    prefill_buckets=(16,),
    prefill_rows=(1, 8),
    decode_block=4,
    context_buckets=(32, MAX_LEN),
)
FEW = EngineConfig(
    slots=2,
    max_len=MAX_LEN,
    prefill_buckets=(16,),
    prefill_rows=(1,),
    decode_block=4,
    context_buckets=(MAX_LEN,),
)
WAIT = 120


def weights(seed):
    # Wider embeddings than at the start of training, so that the softmax is far from flat.
    params = init(jax.random.key(seed), MODEL)
    return {**params, "embed": params["embed"] * 6}


PARAMS, OTHER = weights(0), weights(1)


def text(tokens):
    """Three characters a token, so that a stop string can begin and end inside tokens."""
    return "".join(f"{chr(97 + t // 20)}{chr(65 + t % 20)}." for t in tokens)


@pytest.fixture(scope="module")
def many():
    with Engine(PARAMS, MODEL, MANY, decode=text) as engine:
        engine.warmup()
        yield engine


def few(**changes):
    return Engine(PARAMS, MODEL, FEW, **{"decode": text, **changes})


def play(session, turns, sampling):
    """Return tokens, log-probabilities (None where not sampled) of an episode."""
    tokens, logprobs = [], []
    for new in turns:
        result = session.generate(new, sampling).result(WAIT)
        tokens += [*new, *result.tokens.tolist()]
        logprobs += [None] * len(new) + result.logprobs.tolist()
    return tokens, logprobs


def turns(seed, count=3, longest=8):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 40, rng.integers(1, longest)).tolist() for _ in range(count)]


@jax.jit
def _trainer(params, tokens, temperature):
    positions = jnp.arange(MAX_LEN)[None]
    ones = jnp.ones_like(positions)
    return shifted_logprobs(
        params, MODEL, tokens[None], positions, ones, temperature=temperature
    ).logprobs[0]


def trainer_logprobs(tokens, temperature=1.0, params=PARAMS):
    padded = jnp.zeros(MAX_LEN, jnp.int32).at[: len(tokens)].set(jnp.asarray(tokens))
    return np.asarray(_trainer(params, padded, temperature))[: len(tokens)]


def assert_close(tokens, logprobs, temperature=1.0, params=PARAMS):
    expected = trainer_logprobs(tokens, temperature, params)
    sampled = [i for i, x in enumerate(logprobs) if x is not None]
    assert sampled
    np.testing.assert_allclose(
        [logprobs[i] for i in sampled], [expected[i] for i in sampled], atol=1e-5, rtol=0
    )


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.7, 0.9, 0), (1.5, 1.0, 3)]
)
def test_logprobs_equal_the_trainers_over_turns(many, temperature, top_p, top_k):
    sampling = SamplingConfig(9, temperature=temperature, top_p=top_p, top_k=top_k)
    with many.open_session(3) as session:
        tokens, logprobs = play(session, turns(3), sampling)
        assert list(session.tokens) == tokens
    assert_close(tokens, logprobs, temperature)


def test_greedy_draws_the_likeliest_and_records_temperature_one(many):
    with many.open_session(3) as session:
        tokens, logprobs = play(session, turns(4), SamplingConfig(7, temperature=0.0))
    assert_close(tokens, logprobs)
    for i in [i for i, x in enumerate(logprobs) if x is not None]:
        for rival in range(0, 40, 7):
            swapped = [*tokens[:i], rival]
            assert trainer_logprobs(swapped)[i] <= logprobs[i] + 1e-5


def test_an_episode_does_not_depend_on_its_batch(many):
    sampling = SamplingConfig(8)
    with many.open_session(11) as session:
        alone = play(session, turns(11), sampling)
    sessions = [many.open_session(11 if i == 40 else 1000 + i) for i in range(64)]
    episodes = [([], []) for _ in sessions]
    plans = [turns(11 if i == 40 else 1000 + i) for i in range(64)]
    for turn in range(3):
        futures = [
            s.generate(p[turn], sampling if i == 40 else SamplingConfig(3 + i % 9, temperature=0.8))
            for i, (s, p) in enumerate(zip(sessions, plans, strict=True))
        ]
        for (tokens, logprobs), future, p in zip(episodes, futures, plans, strict=True):
            result = future.result(WAIT)
            tokens += [*p[turn], *result.tokens.tolist()]
            logprobs += [None] * len(p[turn]) + result.logprobs.tolist()
    for session in sessions:
        session.close()
    assert episodes[40][0] == alone[0]
    assert_close(*episodes[40])
    assert_close(*episodes[7], temperature=0.8)


def test_eviction_changes_nothing(many):
    sampling, keys = SamplingConfig(6), range(5)
    expected = []
    for key in keys:
        with many.open_session(key) as session:
            expected.append(play(session, turns(key), sampling))
    with few() as engine:
        sessions = [engine.open_session(key) for key in keys]
        got = [([], []) for _ in keys]
        for turn in range(3):
            futures = [s.generate(turns(k)[turn], sampling) for k, s in enumerate(sessions)]
            for key, future in enumerate(futures):
                result = future.result(WAIT)
                new = turns(key)[turn]
                got[key][0].extend([*new, *result.tokens.tolist()])
                got[key][1].extend([None] * len(new) + result.logprobs.tolist())
        assert engine.stats()["evictions"] >= 8
    for mine, theirs in zip(got, expected, strict=True):
        assert mine[0] == theirs[0]
        assert_close(*mine)


def test_a_shared_prompt_is_prefilled_once(many):
    prompt, sampling = list(range(1, 13)), SamplingConfig(10)
    before = many.stats()
    sessions = [many.open_session(50 + i) for i in range(8)]
    futures = [session.generate(prompt, sampling) for session in sessions]
    shared = [future.result(WAIT) for future in futures]
    after = many.stats()
    for session in sessions:
        session.close()
    assert after["prefill_tokens"] - before["prefill_tokens"] == len(prompt) - 1
    assert after["copies"] - before["copies"] == 7
    assert len({tuple(result.tokens.tolist()) for result in shared}) == 8
    for i, result in enumerate(shared):
        with many.open_session(50 + i) as session:  # alone: nothing to copy from
            tokens, logprobs = play(session, [prompt], sampling)
        assert result.tokens.tolist() == tokens[len(prompt) :]
        np.testing.assert_allclose(result.logprobs, logprobs[len(prompt) :], atol=1e-6)
    assert many.stats()["copies"] == after["copies"]


def test_a_rolled_back_prompt_is_no_source_for_copies():
    started = threading.Event()
    held = []

    def decode(tokens):
        started.set()
        held[0].cancel()
        return text(tokens)

    with few(decode=decode) as engine:
        first, second = engine.open_session(1), engine.open_session(2)
        prompt = list(range(1, 10))
        future = first.generate(prompt, SamplingConfig(40, stop_strings=("never",)))
        held.append(future)
        assert started.wait(WAIT)
        with pytest.raises(CancelledError):
            future.result(WAIT)
        while first._record.job is not None:
            pass
        assert first.tokens == ()
        first.generate(list(range(20, 32)), SamplingConfig(3)).result(WAIT)
        tokens, logprobs = play(second, [prompt], SamplingConfig(5))
    assert_close(tokens, logprobs)


def test_stop_tokens_end_a_turn_and_are_kept(many):
    with many.open_session(5) as session:
        free, _ = play(session, [[1, 2, 3]], SamplingConfig(20))
    drawn = free[3:]
    stop = drawn[9]
    cut = drawn.index(stop) + 1
    with many.open_session(5) as session:
        future = session.generate([1, 2, 3], SamplingConfig(20, stop_tokens=(39 - stop, stop)))
        result = future.result(WAIT)
    if 39 - stop in drawn:
        cut = min(cut, drawn.index(39 - stop) + 1)
    assert result.tokens.tolist() == drawn[:cut]
    assert result.stop == "stop_token"


@pytest.mark.parametrize("end", [3, 4, 5, 8, 11, 19])
def test_stop_strings_cut_exactly_wherever_they_end(many, end):
    prompt = [4, 5, 6]
    with many.open_session(6) as session:
        drawn = play(session, [prompt], SamplingConfig(20))[0][3:]
    # Ends inside token `end` (counted from 1) and begins inside the one two before it.
    string = text(drawn)[3 * (end - 3) + 1 : 3 * (end - 1) + 2]
    cut = next(n for n in range(1, 21) if string in text(drawn[:n]))
    with many.open_session(6) as session:
        sampling = SamplingConfig(20, stop_strings=("zz", string))
        first = session.generate(prompt, sampling).result(WAIT)
        assert first.tokens.tolist() == drawn[:cut]
        assert first.stop == "stop_string"
        assert list(session.tokens) == prompt + drawn[:cut]
        # What was dropped must leave no trace in the next turn.
        second = session.generate([7, 8], SamplingConfig(6)).result(WAIT)
        tokens = list(session.tokens)
    logprobs = [None] * 3 + first.logprobs.tolist() + [None] * 2 + second.logprobs.tolist()
    assert_close(tokens, logprobs)


def test_length_and_context_stops(many):
    with many.open_session(7) as session:
        assert session.generate([1], SamplingConfig(5)).result(WAIT).stop == "length"
        full = session.generate([2] * 50, SamplingConfig(30)).result(WAIT)
        assert (len(full.tokens), full.stop) == (8, "context")
        tokens = session.tokens
        assert len(tokens) == MAX_LEN
        after = session.generate([3], SamplingConfig(5)).result(WAIT)
        assert (len(after.tokens), after.stop) == (0, "context")
        assert session.tokens == tokens


@partial(jax.jit, static_argnums=1)
def _mixture(row, switch):
    """Log-probabilities of tokens 1.. where PARAMS fed the first ``switch``, OTHER the rest."""
    positions = jnp.arange(row.shape[1])[None]
    ones = jnp.ones_like(positions)
    head, cache = forward(
        PARAMS, MODEL, row[:, :switch], positions[:, :switch], ones[:, :switch],
        init_cache(MODEL, 1, MAX_LEN),
    )  # fmt: skip
    tail, _ = forward(OTHER, MODEL, row[:, switch:], positions[:, switch:], ones[:, switch:], cache)
    old = token_logprobs(PARAMS, MODEL, head, row[:, 1 : switch + 1]).logprobs[0]
    return old, token_logprobs(OTHER, MODEL, tail[:, :-1], row[:, switch + 1 :]).logprobs[0]


def test_weights_swap_between_blocks_of_a_generation():
    swapped = []

    def decode(tokens):  # runs in the engine's thread while the second block is under way
        if not swapped:
            swapped.append(True)
            engine.set_params(OTHER, 7)
        return text(tokens)

    prompt = [3, 1, 4, 1, 5]
    engine = few(decode=decode)
    with engine, engine.open_session(9) as session:
        result = session.generate(prompt, SamplingConfig(20, stop_strings=("none",))).result(WAIT)
        assert engine.stats()["version"] == 7
    assert result.versions.tolist() == [0] * 8 + [7] * 12
    tokens = [*prompt, *result.tokens.tolist()]
    # By hand: old weights feed all that was cached at the swap, new ones the rest.
    old, new = _mixture(jnp.asarray([tokens]), len(prompt) + 8 - 1)
    expected = np.concatenate([old, new])[len(prompt) - 1 :]
    np.testing.assert_allclose(result.logprobs, expected, atol=1e-5, rtol=0)
    # The mixture is neither of the two models, or this test would show nothing.
    assert np.abs(trainer_logprobs(tokens, params=OTHER)[-12:] - result.logprobs[-12:]).max() > 1e-3


def test_refresh_after_swap_starts_the_next_turn_from_the_new_weights():
    config = EngineConfig(**{**vars(FEW), "refresh_after_swap": True})
    with Engine(PARAMS, MODEL, config) as engine, engine.open_session(9) as session:
        session.generate([3, 1, 4], SamplingConfig(6)).result(WAIT)
        engine.set_params(OTHER, 1)
        second = session.generate([5, 6], SamplingConfig(6)).result(WAIT)
        tokens = list(session.tokens)
    assert second.versions.tolist() == [1] * 6
    expected = trainer_logprobs(tokens, params=OTHER)[-6:]
    np.testing.assert_allclose(second.logprobs, expected, atol=1e-5, rtol=0)


def test_set_params_survives_donation_of_the_trainers_buffers():
    donate = jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)
    mine = jax.tree.map(jnp.copy, PARAMS)
    with few() as engine, engine.open_session(3) as session:
        engine.set_params(mine, 1)
        donate(mine)
        tokens, logprobs = play(session, turns(3), SamplingConfig(6))
    assert_close(tokens, logprobs)


def test_heads_change_neither_what_is_sampled_nor_what_is_compiled(many):
    headed = add_heads(PARAMS, jax.random.key(0), MODEL, {"values": HeadConfig()})

    def sample(seed):
        with many.open_session(seed) as session:
            return play(session, turns(seed), SamplingConfig(9))

    tokens, logprobs = sample(5)
    many.set_params(headed, 0)
    again, same = sample(5)
    assert again == tokens and same == logprobs
    stats = many.stats()
    assert stats["compilations"] == stats["compilations_in_warmup"]
    many.set_params(PARAMS, 0)


def test_an_engine_starts_from_parameters_with_heads():
    headed = add_heads(PARAMS, jax.random.key(0), MODEL, {"values": HeadConfig()})
    with Engine(headed, MODEL, FEW) as engine, engine.open_session(3) as session:
        tokens, logprobs = play(session, turns(3), SamplingConfig(6))
    assert_close(tokens, logprobs)


def test_nothing_compiles_after_the_warm_up(many):
    rng = np.random.default_rng(0)
    for count in (1, 3, 30, 70):
        sessions = [many.open_session(i) for i in range(count)]
        futures = [
            session.generate(
                rng.integers(0, 40, rng.integers(1, 50)).tolist(),
                SamplingConfig(
                    int(rng.integers(1, 15)),
                    temperature=float(rng.random()),
                    top_k=int(rng.integers(0, 9)),
                    top_p=0.5 + 0.5 * float(rng.random()),
                    min_p=0.1 * float(rng.random()),
                    stop_tokens=tuple(range(int(rng.integers(0, 8)))),
                ),
            )
            for session in sessions
        ]
        for future in futures:
            future.result(WAIT)
        many.set_params(PARAMS, 0)
        for session in sessions:
            session.close()
    stats = many.stats()
    assert stats["compilations_in_warmup"] > 5
    assert stats["compilations"] == stats["compilations_in_warmup"]


def test_the_compilation_counter_counts():
    before = compilations()
    jax.jit(lambda x: x * 3 + 1)(np.ones(7, np.float32))
    assert compilations() > before


def test_an_exception_in_the_engines_thread_fails_every_future(monkeypatch):
    def broken(*_, **__):
        raise MemoryError("no memory left")

    engine = few()
    sessions = [engine.open_session(i) for i in range(4)]
    monkeypatch.setattr(programs, "decode_block", broken)
    futures = [session.generate([1, 2], SamplingConfig(5)) for session in sessions]
    for future in futures:
        with pytest.raises(MemoryError, match="no memory left"):
            future.result(WAIT)
    with pytest.raises(RuntimeError, match="no memory left"):
        engine.open_session(1)
    with pytest.raises(RuntimeError, match="no memory left"):
        sessions[0].generate([1], SamplingConfig(5))
    sessions[0].close()
    engine.close()


def test_an_exception_of_decode_fails_its_generation_only():
    def decode(tokens):
        raise KeyError("unknown token")

    with few(decode=decode) as engine:
        bad, good = engine.open_session(1), engine.open_session(2)
        failing = bad.generate([1], SamplingConfig(9, stop_strings=("x",)))
        fine = good.generate([1], SamplingConfig(9))
        with pytest.raises(KeyError, match="unknown token"):
            failing.result(WAIT)
        assert len(fine.result(WAIT).tokens) == 9


def test_closing_a_session_while_it_generates_frees_its_slot():
    sessions = []

    def decode(tokens):
        sessions[0].close()
        return text(tokens)

    with few(decode=decode) as engine:
        sessions += [engine.open_session(i) for i in range(3)]
        doomed = sessions[0].generate([1], SamplingConfig(60, stop_strings=("none",)))
        others = [s.generate([2, 3], SamplingConfig(12)) for s in sessions[1:]]
        with pytest.raises(SessionClosedError):
            doomed.result(WAIT)
        assert [len(future.result(WAIT).tokens) for future in others] == [12, 12]
        with pytest.raises(SessionClosedError):
            sessions[0].generate([1], SamplingConfig(1))


def test_closing_the_engine_fails_what_is_under_way():
    entered, leaving = threading.Event(), threading.Event()

    def decode(tokens):
        entered.set()
        leaving.wait(WAIT)  # holds the generation until close() has been called
        return text(tokens)

    engine = few(decode=decode)
    future = engine.open_session(1).generate([1], SamplingConfig(60, stop_strings=("none",)))
    assert entered.wait(WAIT)
    closer = threading.Thread(target=engine.close)
    closer.start()
    while not engine._closing:
        pass
    leaving.set()
    closer.join(WAIT)
    with pytest.raises(SessionClosedError):
        future.result(WAIT)
    with pytest.raises(RuntimeError):
        engine.open_session(2)


def test_idle_time_is_counted_while_sessions_wait(many):
    with many.open_session(1) as session:
        session.generate([1], SamplingConfig(1)).result(WAIT)
        before = many.stats()["idle_seconds"]
        threading.Event().wait(0.1)
        session.generate([1], SamplingConfig(1)).result(WAIT)
        assert many.stats()["idle_seconds"] - before > 0.05


def test_misuse_is_refused_in_one_line(many):
    with many.open_session(1) as session:
        with pytest.raises(ValueError, match="at least 1 token"):
            session.generate([], SamplingConfig(1))
        with pytest.raises(ValueError, match=r"\[0, 40\)"):
            session.generate([40], SamplingConfig(1))
        with pytest.raises(ValueError, match="max_stop_tokens"):
            session.generate([1], SamplingConfig(1, stop_tokens=tuple(range(9))))
        future = session.generate([1], SamplingConfig(60))
        with pytest.raises(RuntimeError, match="has not ended"):
            session.generate([1], SamplingConfig(1))
        future.result(WAIT)
    with few(decode=None) as engine, pytest.raises(ValueError, match="decode"):
        engine.open_session(1).generate([1], SamplingConfig(1, stop_strings=("x",)))
    with pytest.raises(ValueError, match="max_len"):
        Engine(PARAMS, MODEL, EngineConfig(slots=1, max_len=4 * MAX_LEN))


def test_warming_up_with_sessions_in_slots_is_refused_and_harms_nothing(many):
    with many.open_session(1) as session:
        session.generate([1], SamplingConfig(2)).result(WAIT)
        with pytest.raises(RuntimeError, match="before the first generate"):
            many.warmup()
        assert len(session.generate([1], SamplingConfig(2)).result(WAIT).tokens) == 2
