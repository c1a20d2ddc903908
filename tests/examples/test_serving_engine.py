"""The serving engine against a dense model without pages, and its scheduling."""

import functools
import gc
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from examples.serving.engine import Engine, Limits
from examples.serving.model import Config, rms_norm, rotate
from examples.serving.presets import init_params
from examples.serving.request import Request
from examples.serving.sampling import Sampling
from examples.serving.step import copy_implementation
from jaxkv._src.cache.host_layout import PageGeometry
from jaxkv._src.offload import step_result

pytestmark = pytest.mark.end_to_end

CONFIG = Config(256, 64, 96, 2, 8, 4, 16)
LENGTHS = (37, 3, 70, 18, 1, 52)
NEW_TOKENS = 12


@pytest.fixture(autouse=True)
def full_float32_products():
    """No TF32, whose rounding is of the order of the margin between the two best tokens."""
    with jax.default_matmul_precision("highest"):
        yield


@functools.cache
def params():
    with jax.ensure_compile_time_eval():  # also if the first use is in a jitted function
        return init_params(CONFIG, 1, "float32")


def prompts():
    """With a common prefix of 24 tokens among the long ones."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (len(LENGTHS), max(LENGTHS)))
    tokens[:, :24] = tokens[0, :24]
    return [row[:length].tolist() for row, length in zip(tokens, LENGTHS, strict=True)]


@jax.jit
def dense_logits(tokens):
    """Logits after each token of a sequence; every token attends to all before it."""
    eps, positions = CONFIG.rms_norm_eps, jnp.arange(len(tokens))
    x = params()["embed_tokens"][tokens]
    for layer in params()["layers"]:
        h = rms_norm(x, layer["input_layernorm"], eps)
        q, k, v = ((h @ layer[f"self_attn.{n}_proj"].T).reshape(len(tokens), -1, 16) for n in "qkv")
        q = rotate(rms_norm(q, layer["self_attn.q_norm"], eps), positions, CONFIG.rope_theta)
        k = rotate(rms_norm(k, layer["self_attn.k_norm"], eps), positions, CONFIG.rope_theta)
        k, v = jnp.repeat(k, 2, axis=1), jnp.repeat(v, 2, axis=1)
        scores = jnp.einsum("qhd,khd->hqk", q, k) / 4
        scores = jnp.where(positions[:, None] >= positions, scores, -jnp.inf)
        out = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v).reshape(len(tokens), -1)
        x += out @ layer["self_attn.o_proj"].T
        h = rms_norm(x, layer["post_attention_layernorm"], eps)
        gate, up = h @ layer["mlp.gate_proj"].T, h @ layer["mlp.up_proj"].T
        x += (jax.nn.silu(gate) * up) @ layer["mlp.down_proj"].T
    return rms_norm(x, params()["norm"], eps) @ params()["lm_head"].T


@functools.cache
def expected():
    """Greedy answers, each token by a full recomputation."""
    answers = []
    for prompt in prompts():
        tokens = np.zeros(max(LENGTHS) + NEW_TOKENS, np.int32)
        tokens[: len(prompt)] = prompt
        for end in range(len(prompt), len(prompt) + NEW_TOKENS):
            tokens[end] = np.asarray(dense_logits(tokens))[end - 1].argmax()
        answers.append(tokens[len(prompt) :][:NEW_TOKENS].tolist())
    return answers


def make_engine(num_hbm_pages=80, num_host_pages=0, *, batch=4, token_budget=24, **options):
    limits = Limits(4, batch, token_budget, pages_per_request=24, copy_pages=8)
    return Engine(CONFIG, params(), limits, num_hbm_pages, num_host_pages, **options)


def run(engine, requests, max_steps=2000, until=lambda: False):
    for request in requests:
        engine.submit(request)
    for _ in range(max_steps):
        if engine.busy and not until():
            engine.step()
    jaxkv.check_errors(engine.state)
    assert all(request.finished for request in requests)
    return [request.answer for request in requests]


def requests(**options):
    return [Request(prompt, NEW_TOKENS, **options) for prompt in prompts()]


@pytest.mark.parametrize("token_budget", [7, 24, 200])
def test_answers_equal_those_of_a_dense_model(token_budget):
    assert run(make_engine(token_budget=token_budget), requests()) == expected()


def test_consecutive_pages_of_the_host_pool_are_adjacent():
    """The copy engine then takes one descriptor for them."""
    engine = make_engine(num_host_pages=4)
    block_bytes = engine.spec.block_bytes
    adjacent = PageGeometry.contiguous(block_bytes, block_bytes)
    assert engine.pool.host_layout.page_geometry() == adjacent


def test_answers_in_bucketed_batches(monkeypatch):
    limits = Limits(4, 4, 60, 24, token_buckets=(9, 30))
    engine, sizes = Engine(CONFIG, params(), limits, 80), set()
    inputs = engine._inputs

    def noted(rows, copies, num_tokens):
        sizes.add(num_tokens)
        return inputs(rows, copies, num_tokens)

    monkeypatch.setattr(engine, "_inputs", noted)
    assert run(engine, requests()) == expected()
    assert run(engine, requests()[1:2]) == expected()[1:2]
    assert sizes == {4, 9, 30, 60}
    with pytest.raises(ValueError, match=r"batch=4 must be less than .* \[4, 60\]"):
        Limits(4, 4, 60, 24, token_buckets=(4,))


def test_answers_after_preemption():
    engine, batch = make_engine(num_hbm_pages=30), requests()
    assert run(engine, batch) == expected()
    assert any(request.preemptions for request in batch)
    assert not any(engine.blocks._references)


@pytest.mark.parametrize("chosen", [None, "xla"])
def test_answers_with_the_host_tier(chosen, monkeypatch):
    """The same prompts again, in few pages: their pages are loaded from host memory."""
    engine = make_engine(num_hbm_pages=30, num_host_pages=120)
    engine._copy_implementation = chosen  # the copy engine on a GPU, with blocks of 64 KiB
    step, used = engine._run, set()

    def noted(inputs, sampling):
        if inputs.copies.kind != "none":
            prompts = len(inputs.tokens) > 4
            used.add((inputs.copies.kind, prompts, inputs.copies.implementation))
        return step(inputs, sampling)

    monkeypatch.setattr(engine, "_run", noted)
    turns = [requests() for _ in range(3)]
    assert [run(engine, turn) for turn in turns] == [expected()] * 3
    assert used == {
        ("store", True, chosen),
        ("store", False, chosen),
        ("load", True, chosen),
        ("load", False, None),  # decode
    }
    assert sum(request.first_placement.loaded for request in turns[-1]) >= 8
    assert {len(engine.host._loads), len(engine.blocks._loading)} == {0}
    assert engine.host.metrics()["kv_offload_pinned_blocks"] == 0


@pytest.mark.cpu_only
def test_copy_engine_needs_large_blocks_and_a_gpu(monkeypatch):
    engine = make_engine(num_host_pages=4)
    chosen = partial(copy_implementation, engine.pool, engine.state.cache)
    assert chosen(64 << 10) is None
    monkeypatch.setattr(jaxkv, "explain", lambda *args, **options: "dma (requested)")
    assert [chosen(size) for size in (64 << 10, 63 << 10)] == ["dma", None]
    assert copy_implementation(None, engine.state.cache, 64 << 10) is None


def test_programs_without_copies_do_not_take_the_pool():
    engine = make_engine(num_host_pages=4)
    pools = {inputs.copies.kind: engine._arguments(inputs)[2] for inputs in engine.padded_inputs()}
    assert pools == {"none": None, "load": engine.pool, "store": engine.pool}


def test_full_collections_visit_only_what_is_newer_than_the_engine():
    make_engine().warm_up()
    try:
        assert gc.get_freeze_count() > 10 * len(gc.get_objects())
    finally:
        gc.unfreeze()


def test_host_is_a_step_ahead_and_waits_for_nothing_else(monkeypatch):
    """The only sync of a step is the read of the tokens of the step before, after its dispatch."""
    engine = make_engine(num_host_pages=80)
    engine.warm_up()
    order: list[str] = []

    def record(name, method):
        def recorded(*args):
            order.append(name)
            return method(*args)

        monkeypatch.setattr(engine, method.__name__, recorded)

    record("dispatch", engine._dispatch)
    record("read", engine._append)
    batch = requests()
    for request in batch:
        engine.submit(request)
    with jaxkv.forbid_host_sync() as report:
        while engine.busy:
            order.append("step")
            engine.step()
    reads, polls = "tokens of the previous step, while this one runs", "a result that is ready"
    waits = [sync for sync in report.syncs if polls not in str(sync.allowed)]
    assert {sync.allowed for sync in waits} == {reads}
    assert len(waits) <= order.count("dispatch")
    steps = " ".join(order).split("step")
    assert all(step.find("dispatch") < step.find("read") for step in steps if "dispatch" in step
               and "read" in step)  # fmt: skip
    assert sum("dispatch read" in step for step in steps) > 10
    assert [request.answer for request in batch] == expected()


def test_every_step_of_an_answer_is_dispatched_before_the_last_token_is_read():
    """One step for each token, and one to read the last."""
    engine, request = make_engine(), requests()[1]
    engine.submit(request)
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
    assert request.answer == expected()[1] and steps == NEW_TOKENS + 1


def test_stop_drops_the_token_computed_ahead():
    stop = expected()[0][4]
    length = expected()[0].index(stop) + 1
    batch = requests(stop=lambda request: request.tokens[-1] == stop)
    answers = run(make_engine(), batch)
    assert answers[0] == expected()[0][:length]
    for answer, full in zip(answers, expected(), strict=True):
        assert answer == full[: len(answer)]


def test_cancelled_request_frees_its_row_and_pages():
    engine, batch = make_engine(num_host_pages=40), requests()
    for request in batch:
        engine.submit(request)
    for _ in range(4):
        engine.step()
    engine.cancel(batch[0])
    engine.cancel(batch[-1])
    while engine.busy:
        engine.step()
    assert [request.answer for request in batch[1:-1]] == expected()[1:-1]
    assert sorted(engine._slots) == list(range(4))


def loading(engine):
    """Two requests with prompts on the host and not in HBM, and the expected answers.

    They have no common prefix, and the second one loads in a later step.
    """
    pair = prompts()[2], prompts()[5][24:]
    answers = run(engine, [Request(prompt, NEW_TOKENS) for prompt in pair])
    for offset in range(3):
        run(engine, [Request([*range(offset, 80 + offset)], 8)])
    batch = [Request(prompt, NEW_TOKENS) for prompt in pair]
    for request in batch:
        engine.submit(request)
    engine.step()
    assert all(request.placement and request.placement.loaded for request in batch)
    return batch, answers


@pytest.mark.parametrize("issued", [False, True])
def test_loads_of_discarded_blocks_are_computed_anew(issued, monkeypatch):
    """A block is discarded before its load starts, or while it is in flight."""
    engine = make_engine(num_hbm_pages=44, num_host_pages=120)
    batch, answers = loading(engine)
    with monkeypatch.context() as patched:  # however fast the device is
        patched.setattr(step_result, "is_over", lambda result: False)
        while issued and not batch[1].placement.load.issued:
            engine.step()
    keys = batch[1].placement.load.keys
    engine.host.discard(keys)
    assert not batch[1].placement.load.done
    for _ in range(200):
        if engine.busy:
            engine.step()
    assert [request.answer for request in batch] == answers
    assert [request.preemptions for request in batch] == [0, 1]
    assert not engine.blocks._loading and not any(engine.blocks._references)
    assert run(engine, [Request(batch[1].prompt, NEW_TOKENS)]) == answers[1:]


@pytest.mark.parametrize("kind", ["load", "store"])
def test_serving_goes_on_after_a_step_that_was_not_dispatched(kind, monkeypatch):
    engine = make_engine(num_hbm_pages=30, num_host_pages=120)
    run_step = engine._run
    failures: list[str] = []

    def fails_once(inputs, sampling):
        if inputs.copies.kind == kind and not failures:
            failures.append(kind)
            raise MemoryError("injected")
        return run_step(inputs, sampling)

    if kind == "load":
        run(engine, requests())
    monkeypatch.setattr(engine, "_run", fails_once)
    batch = requests()
    for request in batch:
        engine.submit(request)
    while engine.busy:
        try:
            engine.step()
        except MemoryError:
            continue
    assert failures and [request.answer for request in batch] == expected()
    assert not engine.blocks._loading and engine.host._taken is None
    assert engine.host.metrics()["kv_offload_pinned_blocks"] == 0


def test_prompts_and_answers_share_steps(monkeypatch):
    engine, mixed = make_engine(), 0
    for request in requests():
        engine.submit(request)
    schedule = engine._schedule

    def counted():
        nonlocal mixed
        rows = schedule()
        counts = [count for _, count in rows]
        assert sum(counts) <= 24
        mixed += 1 in counts and max(counts) > 1
        return rows

    monkeypatch.setattr(engine, "_schedule", counted)
    while engine.busy:
        engine.step()
    assert mixed >= 3


@pytest.mark.parametrize("devices", [2, 4])
def test_tensor_parallel_answers_are_equal(devices):
    if len(jax.devices()) < devices:
        pytest.skip(f"needs {devices} devices")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("tp",))
    with jaxkv.SymmetricMemory.create(mesh, "tp", max_bytes=1 << 20) as memory:
        engine = make_engine(num_hbm_pages=30, num_host_pages=60, memory=memory)
        turns = [requests(), requests()]
        assert [run(engine, turn) for turn in turns] == [expected()] * 2
        assert sum(request.first_placement.loaded for request in turns[-1]) > 0


# --- Sampling.


def test_seeds_make_answers_independent_of_the_batch():
    def sampled(seed):
        return Sampling(temperature=1.0, top_p=0.9, seed=seed)

    together = [Request(prompt, NEW_TOKENS, sampled(seed)) for seed, prompt in enumerate(prompts())]
    answers = run(make_engine(), together)
    for seed in (0, 3):
        alone = Request(prompts()[seed], NEW_TOKENS, sampled(seed))
        assert run(make_engine(token_budget=9), [alone]) == [answers[seed]]
    other = Request(prompts()[0], NEW_TOKENS, sampled(77))
    assert run(make_engine(), [other]) != [answers[0]]


@pytest.mark.parametrize("callback", ["stop", "on_token"])
def test_an_exception_of_a_callback_ends_its_request_only(callback):
    def raises(request):
        raise KeyError("injected")

    engine, batch = make_engine(), requests()
    setattr(batch[1], callback, raises)
    for request in batch:
        engine.submit(request)
    raised = 0
    while engine.busy:
        try:
            engine.step()
        except KeyError:
            raised += 1
    assert raised == 1 and batch[1].finished and len(batch[1].answer) == 1
    assert [r.answer for r in batch[:1] + batch[2:]] == expected()[:1] + expected()[2:]


def test_requests_pass_one_whose_blocks_are_being_read_from_a_tier():
    engine, (first, second) = make_engine(), requests()[:2]
    engine.submit(first)
    first.prefetch = jaxkv.OffloadPrefetch(tuple(first.keys))
    assert run(engine, [second], until=lambda: second.finished) == [expected()[1]]
    assert first.placement is None and [*engine.waiting] == [first]
    first.prefetch.done = True
    assert run(engine, []) == [] and first.answer == expected()[0]
