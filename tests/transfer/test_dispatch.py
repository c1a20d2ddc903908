"""`dispatch`: choice of the implementation, on simulated machines."""

import json
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxkv
from jaxkv._src.cache.spec import KVCacheSpec
from jaxkv._src.transfer import dispatch
from jaxkv._src.transfer.dispatch import Machine, force_implementation, select_implementation
from jaxkv._src.transfer.resolve import resolve
from jaxkv._src.tuning import copy_lookup, copy_table, table_files
from tests.util.layout_reference import assert_same_bytes, random_array
from tests.util.strategies import reference_layouts
from tests.util.transfer_cases import assert_rejected, make_case, put

H200 = Machine("gpu", "NVIDIA H200", True)
MEMORIES = {"load": ("pinned_host", "device"), "store": ("device", "pinned_host")}


def array(num_blocks: int, run_bytes: int, memory: str, dtype=jnp.int8) -> jax.ShapeDtypeStruct:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=memory)
    items = run_bytes // np.dtype(dtype).itemsize
    return jax.ShapeDtypeStruct((num_blocks, items), dtype, sharding=sharding)


def ids_of(count: int, on_host: bool = False):
    """HostIds, or device ids as known to tracing, twice."""
    if on_host:
        return (jaxkv.HostIds(np.arange(count)),) * 2
    return (jax.ShapeDtypeStruct((count,), jnp.int32),) * 2


def swap(direction: str, run_bytes: int, count: int, on_host: bool = False, **options):
    """Choice for `swap_blocks` of `count` blocks."""
    memories = MEMORIES.get(direction, ("device", "device"))
    source, destination = (array(count, run_bytes, memory) for memory in memories)
    ids = ids_of(count, on_host)
    [copy] = resolve("swap_blocks", (source, destination), ids, None).copies
    return select_implementation(copy, ids, **options)


@pytest.fixture
def machine(monkeypatch):
    """Replaces this machine by a simulated one."""
    monkeypatch.delenv(copy_lookup.VARIABLE, raising=False)

    def replace(other: Machine = H200) -> None:
        monkeypatch.setattr(dispatch, "_machine", lambda: other)

    return replace


def rule(minima, *candidates, **measured) -> dict:
    keys = ("min_word_bytes", "min_run_bytes", "min_total_bytes")
    return {**dict(zip(keys, minima, strict=True)), **measured, "candidates": candidates}


SIMILAR = ["pallas", 4, 49.0], ["kernel", 12, 50.0], ["dma", 0, 20.0]
LOAD = [
    rule((1, 1, 0), ["kernel", 12, 40.0], ["dma", 0, 2.0], ["pallas", 12, 30.0]),
    rule((1, 65536, 0), ["dma", 0, 50.0], ["kernel", 8, 50.5]),
    rule((16, 8192, 1 << 20), *SIMILAR, measured_size=(16, 32768, 1 << 26)),
    rule((16, 65536, 1 << 20), ["dma", 0, 54.0], ["pallas", 2, 51.0], ["kernel", 4, 51.0]),
]
STORE = [rule((1, 1, 0), ["kernel", 6, None], ["dma", 0, None])]
DEVICE = [rule((1, 1, 0), ["kernel", 100, None])]
OVERLAPPED = [
    rule((1, 1, 0), ["kernel", 3, None]),
    rule((1, 32768, 0), ["dma", 0, None], ["kernel", 5, None]),
]


@pytest.fixture
def table(machine, monkeypatch, tmp_path):
    """An H200 with the table above."""
    machine()
    content = json.loads((copy_table.PACKAGED / table_files.DEFAULT).read_text())
    content |= {"device_kind": H200.device_kind, "commit": "c0ffee" * 6, "how": "by this test"}
    content["rules"] = dict(load=LOAD, store=STORE, device=DEVICE, overlapped=OVERLAPPED)
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(content))
    monkeypatch.setenv(copy_lookup.VARIABLE, str(path))


# --- Choice

MIB = 1 << 20


@pytest.mark.parametrize(
    "run_bytes, count, on_host, expected",
    [
        (1, 1, False, ("kernel", 12)),
        (1, 4, True, ("dma", 0)),
        (1, 5, True, ("kernel", 12)),
        (8064, 1000, False, ("kernel", 12)),  # a run too short by one unit of 128
        (8192, 127, False, ("kernel", 12)),  # a payload too small by one block
        (8192, 128, False, ("pallas", 4)),
        (8192, 128, True, ("pallas", 4)),
        (8200, 1000, False, ("kernel", 12)),  # words of 8 bytes
        (8208, 1000, False, ("kernel", 12)),  # no multiple of 128: unsupported by Pallas
        (65408, 1000, True, ("pallas", 4)),
        (65536, 1, False, ("kernel", 8)),  # device ids
        (65536, 15, False, ("kernel", 8)),
        (65536, 16, False, ("pallas", 2)),
        (65536, 16, True, ("dma", 0)),
        (65544, 100, False, ("kernel", 8)),
    ],
)
def test_load_is_selected_by_size_alignment_and_ids(table, run_bytes, count, on_host, expected):
    chosen = swap("load", run_bytes, count, on_host)
    assert (chosen.implementation, chosen.num_sms) == expected


@pytest.mark.parametrize("overlapped, otherwise", [(False, "pallas"), (True, "kernel")])
def test_descriptor_limit_excludes_dma(table, overlapped, otherwise):
    """Of blocks in one run, joined or not; an explicit request for dma is honoured."""

    def chosen(count: int, **options):
        return swap("load", 65536, count, True, overlapped=overlapped, **options)

    assert chosen(4096).implementation == "dma"
    more = chosen(4097)
    assert more.implementation == otherwise
    assert "not dma: up to 4097 descriptors written by the host, the limit is 4096" in more.text
    assert chosen(4097, implementation="dma").implementation == "dma"
    with force_implementation("dma"):
        assert chosen(4097).implementation == "dma"


@pytest.mark.parametrize("layout, runs", [("page_first_direct", 1), ("page_first", 16)])
def test_descriptors_are_counted_per_run_and_buffer(layout, runs):
    case = make_case(layout, page_size=16, num_kv_heads=4, head_dim=64, num_layers=3)
    ids = ids_of(7)
    [copy] = resolve("load_pages", (case.pool(), case.cache()), ids, None).copies
    assert dispatch._descriptors(copy, ids) == 7 * 2 * 3 * runs


def test_each_direction_has_its_own_rules(table):
    sms = [swap(d, 1024, 8).num_sms for d in ("load", "store", "device")]
    assert sms == [12, 6, 100]


@pytest.mark.parametrize(
    "run_bytes, on_host, expected",
    [
        (32760, True, ("kernel", 3)),
        (32768, True, ("dma", 0)),
        (32768, False, ("kernel", 5)),
        (8192, False, ("kernel", 3)),
    ],
)
def test_overlapped_rules(table, run_bytes, on_host, expected):
    chosen = swap("load", run_bytes, 1000, on_host, overlapped=True)
    assert (chosen.implementation, chosen.num_sms) == expected
    assert "not pallas: XLA runs Pallas kernels on its own stream" in chosen.text
    with pytest.raises(NotImplementedError, match="'pallas' does not support this call: XLA runs"):
        swap("load", run_bytes, 1000, implementation="pallas", overlapped=True)


@pytest.mark.parametrize("operation", ["load_pages", "store_pages"])
@pytest.mark.parametrize(
    "layout, run_bytes", [("page_first_direct", 16 * 512), ("page_first", 512), ("page_head", 128)]
)
def test_pages_are_selected_by_the_runs_of_their_layout(table, operation, layout, run_bytes):
    """A pool's type may not show that it is in host memory; the operation's name does."""
    case = make_case(layout, page_size=16, num_kv_heads=4, head_dim=64, num_layers=4)
    ids = ids_of(8)
    [copy] = resolve(operation, (case.pool(), case.cache()), ids, None).copies
    size = dispatch._size(copy, ids)
    assert size.run_bytes == run_bytes and size.word_bytes == 16
    assert size.total_bytes == 8 * 2 * 4 * case.spec.block_bytes
    assert (
        select_implementation(copy, ids).num_sms == {"load_pages": 12, "store_pages": 6}[operation]
    )


@pytest.mark.parametrize("head_dim, word_bytes", [(1, 2), (2, 4), (3, 2), (4, 8), (8, 16)])
def test_word_width(head_dim, word_bytes):
    case = make_case("page_head", page_size=1, num_kv_heads=4, num_layers=2, head_dim=head_dim)
    ids = ids_of(3)
    [copy] = resolve("load_pages", (case.pool(), case.cache()), ids, None).copies
    assert dispatch._size(copy, ids).word_bytes == word_bytes


# --- Machines


def test_unknown_device_kind_uses_the_default_table(machine):
    machine(Machine("gpu", "Some GPU", True))
    small, large = swap("load", 8192, 10_000), swap("load", 65536, 10, on_host=True)
    assert (small.implementation, large.implementation) == ("kernel", "dma")
    assert "default.json (not measured: python -m jaxkv.tune" in small.text


def test_gpu_without_cuda_handlers_is_unsupported(machine):
    machine(Machine("gpu", "NVIDIA H200", False))
    for on_host in (False, True):
        with pytest.raises(NotImplementedError, match=r"no implementation supports .*without CUDA"):
            swap("load", 8192, 100, on_host)


def test_cpu_platform_selects_host(machine):
    machine(Machine("cpu", "cpu", False))
    for direction in ("load", "store", "device"):
        for overlapped in (False, True):
            chosen = swap(direction, 8192, 100, overlapped=overlapped)
            assert (chosen.implementation, chosen.num_sms) == ("host", 0)


@pytest.mark.parametrize("direction, word", [("load", "device memory"), ("device", None)])
def test_cpu_platform_interprets_pallas_only_if_requested(machine, direction, word):
    machine(Machine("cpu", "cpu", False))
    assert "not pallas: interpreted on platform cpu" in swap(direction, 8192, 100).text
    call = partial(swap, direction, 8192, 100, implementation="pallas")
    if word:
        assert_rejected(call, NotImplementedError, "pallas", word)
    else:
        assert call().implementation == "pallas"


def copies_of(layout):
    spec = layout.spec
    pool = jaxkv.HostPool(
        data=cast(jax.Array, jax.ShapeDtypeStruct(layout.shape, spec.dtype)),
        spec=spec,
        layout=layout.name,
        head_groups=layout.head_groups,
    )
    block = jax.ShapeDtypeStruct((3, *spec.block_shape), spec.dtype)
    halves = (block,) * layout.num_kv
    return pool, jaxkv.DeviceCache(layers=(halves,) * spec.num_layers, spec=spec)


@given(
    layout=reference_layouts(),
    scale=st.sampled_from([1, 16, 4096]),
    count=st.sampled_from([1, 8, 50_000]),
    kind=st.sampled_from(["NVIDIA H200", "Some GPU"]),
    operation=st.sampled_from(["load_pages", "store_pages"]),
    on_host=st.booleans(),
    overlapped=st.booleans(),
    requested=st.sampled_from([None, *copy_table.IMPLEMENTATIONS]),
)
def test_unsupported_implementations_are_never_selected(
    layout, scale, count, kind, operation, on_host, overlapped, requested
):
    """For all sizes; and SM implementations get at least one SM."""
    spec = layout.spec
    larger = dict(vars(spec), head_dim=spec.head_dim * scale)
    layout = type(layout)(KVCacheSpec(**larger), layout.name, layout.num_pages, layout.head_groups)
    machine, ids = Machine("gpu", kind, True), ids_of(count, on_host)
    [copy] = resolve(operation, copies_of(layout), ids, None).copies
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(copy_lookup.VARIABLE, raising=False)
        patch.setattr(dispatch, "_machine", lambda: machine)
        unsupported = dispatch._unsupported_reasons(machine, copy, ids, requested, overlapped)
        if requested in unsupported:
            with pytest.raises(
                NotImplementedError, match=f"'{requested}' does not support this call"
            ):
                select_implementation(copy, ids, requested, overlapped=overlapped)
            return
        chosen = select_implementation(copy, ids, requested, overlapped=overlapped)
    assert chosen.implementation not in unsupported
    assert requested in (None, chosen.implementation)
    assert (chosen.num_sms >= 1) == (chosen.implementation in copy_table.ON_SMS)
    for name, reason in unsupported.items():
        assert f"\n  not {name}: {reason}" in chosen.text


# --- Messages


def test_explain_reports_rates_and_source(table):
    arrays = array(200, 8192, "pinned_host"), array(200, 8192, "device")
    assert jaxkv.explain(jaxkv.swap_blocks, *arrays, *ids_of(200, True)).splitlines() == [
        "swap_blocks: pallas (best supported, 49 GB/s on 4 SMs at 2048 x 32768 bytes)",
        "  not dma: not faster, 20 GB/s at 2048 x 32768 bytes",
        "  not kernel: similar throughput on more SMs, 50 GB/s on 12 SMs at 2048 x 32768 bytes",
        "  not host: CPU backend only, the platform is gpu",
        "  not xla: slower than the handlers of jaxkv: only if requested",
        "  by measured.json (commit c0ffeec0f): load, words of 16 bytes or more, "
        "runs of 8192 bytes or more, payload of 1048576 bytes or more",
    ]


def test_explain_omits_rates_of_an_unknown_size(table):
    lines = swap("load", 65536, 200, on_host=True).text.splitlines()
    assert lines[0] == "swap_blocks: dma (best supported)"
    assert "  not kernel: lower rank in the table, on 4 SMs" in lines


def test_explain_of_a_requested_implementation(table):
    arrays = array(200, 8192, "device"), array(200, 8192, "pinned_host")
    text = jaxkv.explain(jaxkv.swap_blocks, *arrays, *ids_of(200), implementation="pallas")
    first, *others = text.splitlines()
    assert first == "swap_blocks: pallas (requested, on 12 SMs)"  # not in the table: default's
    assert "  not kernel: another implementation was requested, on 6 SMs" in others


@pytest.mark.parametrize("name, sms", [("start_load", 3), ("start_store", 3), ("load_pages", 12)])
def test_explain_uses_overlapped_rules_for_starts(table, name, sms):
    case = make_case()
    text = jaxkv.explain(getattr(jaxkv, name), case.pool(), case.cache(), *ids_of(5))
    assert text.startswith(f"{name}: kernel (") and f"on {sms} SMs" in text


def test_explain_reports_the_latency_of_few_descriptors(table):
    first, *others = swap("store", 8192, 4, on_host=True).text.splitlines()
    assert first == "swap_blocks: dma (lowest latency of up to 4 descriptors)"
    assert others[0] == "  not kernel: higher latency, on 6 SMs"
    assert swap("store", 8192, 4, on_host=True, overlapped=True).implementation == "kernel"


def test_explain_without_measurements_reports_rank(table):
    lines = swap("store", 8192, 5, on_host=True).text.splitlines()
    assert "  not dma: lower rank in the table" in lines


@pytest.mark.parametrize("operation", [jaxkv.swap_blocks, select_implementation])
def test_unknown_implementation_is_rejected(operation):
    name: Any = "memcpy"
    with pytest.raises(ValueError, match="one of dma, kernel, pallas, host, xla, got 'memcpy'"):
        if operation is select_implementation:
            swap("device", 64, 1, implementation=name)
        else:
            jaxkv.swap_blocks((), (), [], [], implementation=name)


def test_forced_implementation_applies_to_open_calls_in_the_context(table):
    with force_implementation("kernel", 7):
        chosen = swap("load", 8192, 1000)
        assert (chosen.implementation, chosen.num_sms) == ("kernel", 7)
        assert swap("load", 8192, 1000, implementation="pallas").num_sms == 4
        with force_implementation("dma"):
            assert swap("load", 8192, 1, on_host=True).implementation == "dma"
            with pytest.raises(NotImplementedError, match="HostIds"):
                swap("load", 8192, 1)
        assert swap("load", 8192, 1).num_sms == 7
    assert swap("load", 8192, 1000).implementation == "pallas"


@pytest.mark.parametrize("name, num_sms", [("memcpy", 1), ("kernel", 0), ("pallas", -1)])
def test_invalid_forced_implementation_is_rejected(name, num_sms):
    with (
        pytest.raises(ValueError, match=name if num_sms == 1 else "num_sms must be >= 1"),
        force_implementation(name, num_sms),
    ):
        pass


# --- Pallas, through the public API


@pytest.mark.sanitizer
@pytest.mark.parametrize("inside_jit", [False, True], ids=["eager", "jit"])
def test_pallas_copies_blocks_in_device_memory(inside_jit):
    """Interpreted on cpu; ids with padding, checked as for any other implementation."""
    rng = np.random.default_rng(0)
    source, destination = (random_array(rng, (n, 4096), "int32") for n in (4, 5))
    ids = np.array([3, -1, 0], np.int32), np.array([4, 2, 1], np.int32)
    expected = destination.copy()
    expected[[4, 1]] = source[[3, 0]]
    on_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = put(source, on_device), put(destination, on_device)
    swap_blocks = partial(jaxkv.swap_blocks, implementation="pallas")
    run = jax.jit(swap_blocks, donate_argnums=1) if inside_jit else swap_blocks
    out = run(*placed, *map(jnp.asarray, ids))
    jaxkv.check_errors(out)
    assert_same_bytes(out, expected, "destination")
    assert_same_bytes(placed[0], source, "source")


@pytest.mark.parametrize(
    "src, dst, direction",
    [
        ("pinned_host", "device", "load"),
        ("device", "pinned_host", "store"),
        ("pinned_host", "pinned_host", "store"),
        ("device", "device", "device"),
    ],
)
def test_swap_direction_follows_memory_kinds(src, dst, direction):
    of = partial(jax.sharding.SingleDeviceSharding, jax.devices()[0])
    source, destination = (
        put(np.zeros((3, 8), np.int8), of(memory_kind=memory)) for memory in (src, dst)
    )
    [copy] = resolve("swap_blocks", (source, destination), ([0], [1]), None).copies
    assert dispatch._direction(copy) == direction
