"""Several groups and block sizes in one call and one launch, compared with NumPy."""

import contextlib
import re
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv._src.transfer import dispatch
from tests.util.array_cases import (
    HOST_PAGES,
    LAYER_ARRAYS,
    LAYERS,
    PAGES,
    random_arrays,
    stored_pool,
)
from tests.util.transfer_cases import as_ids, assert_rejected

FORMS = tuple(LAYER_ARRAYS)
LAYOUTS = ("page_first_direct", "layer_first")
OUT_OF_RANGE = 1000


@st.composite
def groups(draw) -> dict:
    """Groups with their own form, layout, layers and ids, some of them padding."""
    drawn = {}
    for name in "abcde"[: draw(st.integers(1, 5))]:
        count = draw(st.integers(0, PAGES))
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        host, device = (rng.permutation(pages)[:count] for pages in (HOST_PAGES, PAGES))
        wrong = draw(st.sampled_from([0, 0, 0.3]))
        host[rng.random(count) < wrong] = -1
        device[rng.random(count) < wrong] = -1
        drawn[name] = {
            "form": draw(st.sampled_from(FORMS)),
            "layout": draw(st.sampled_from(LAYOUTS)),
            "stacked": draw(st.booleans()),
            "layers": tuple(draw(st.lists(st.integers(0, LAYERS - 1), unique=True))) or None,
            "ids": (host.astype(np.int32), device.astype(np.int32)),
        }
    return drawn


def copied(cache, pool, ids, layers, stacked):
    """The reference: `cache` with the pages of `pool`, by layer."""
    host, device = ids
    used = [i for i, pair in enumerate(zip(host, device, strict=True)) if min(pair) >= 0]

    def of_array(cache, pool):
        cache = cache.copy()
        cache[device[used]] = pool[host[used]]
        return cache

    new = []
    for layer in range(LAYERS):
        old, other = (
            jax.tree.map(lambda array, i=layer: array[i], tree) if stacked else tree[layer]
            for tree in (cache, pool)
        )
        copied_layer = layers is None or layer in layers
        new.append(jax.tree.map(of_array, old, other) if copied_layer else old)
    return jax.tree.map(lambda *arrays: np.stack(arrays), *new) if stacked else new


def assert_same_arrays(got, want) -> None:
    for array, expected in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(array).tobytes() == np.ascontiguousarray(expected).tobytes()


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@settings(max_examples=12, deadline=None)
@given(drawn=groups())
def test_groups_match_reference(drawn, jitted):
    pools, caches, stored, host, device, layers = ({} for _ in range(6))
    for name, group in drawn.items():
        form, layout, stacked = (group[key] for key in ("form", "layout", "stacked"))
        pools[name], stored[name] = stored_pool(form, layout, stacked)
        caches[name] = random_arrays(form, stacked=stacked)
        host[name], device[name] = group["ids"]
        if group["layers"] is not None:
            layers[name] = group["layers"]
    load, store = (
        (lambda *args, f=f: f(*args, layers=layers)) for f in (jaxkv.load_pages, jaxkv.store_pages)
    )
    if jitted:
        load, store = jax.jit(load), jax.jit(store)
    ids = [{name: as_ids(entry, None) for name, entry in side.items()} for side in (host, device)]
    on_gpu = jax.default_backend() == "gpu"
    with dispatch.force_implementation("kernel", 8) if on_gpu else contextlib.nullcontext():
        loaded = load(pools, jax.device_put(caches), *ids)
        new_pools = store(pools, jax.device_put(caches), *ids)
    jaxkv.check_errors((loaded, new_pools))
    every = np.arange(HOST_PAGES, dtype=np.int32)
    for name, group in drawn.items():
        pair, chosen, stacked = group["ids"], layers.get(name), group["stacked"]
        want = copied(caches[name], stored[name], pair, chosen, stacked)
        assert_same_arrays(loaded[name], want)
        back = jaxkv.load_pages(new_pools[name], jax.device_put(stored[name]), every, every)
        want = copied(stored[name], caches[name], pair[::-1], chosen, stacked)
        assert_same_arrays(back, want)


def four_groups():
    forms = dict(zip("abcd", ("fused", "separate", "latent", "fused"), strict=True))
    pools, caches = {}, {}
    for name, form in forms.items():
        pools[name], _ = stored_pool(form, "page_first_direct", False)
        caches[name] = jax.device_put(random_arrays(form, stacked=False))
    ids = {name: jax.device_put(np.arange(3, dtype=np.int32)) for name in forms}
    return pools, caches, ids


@pytest.mark.parametrize("name", ["load_pages", "store_pages"])
def test_four_groups_are_one_call(name):
    pools, caches, ids = four_groups()
    named = "kernel" if jax.default_backend() == "gpu" else "host"
    step = jax.jit(
        lambda *args: getattr(jaxkv, name)(*args, implementation=named),
        donate_argnums=1 if name == "load_pages" else 0,
    )
    lowered = step.lower(pools, caches, ids, ids)
    calls = re.findall(r'custom_call_target="(jaxkv_\w+)"', lowered.compile().as_text() or "")
    assert calls == ["jaxkv_copy_groups"]
    explained = jaxkv.explain(getattr(jaxkv, name), pools, caches, ids, ids, implementation=named)
    assert explained.splitlines()[-1] == f"{name}: 5 copies by {named} in one call"


def test_wrong_id_of_a_group_is_counted_once():
    """The layers of group "c" have two block sizes."""
    pools, caches, ids = four_groups()
    ids["c"] = jax.device_put(np.array([0, OUT_OF_RANGE, 1], np.int32))
    step = jax.jit(jaxkv.load_pages)
    if jax.default_backend() == "cpu":
        assert_rejected(
            lambda: jax.block_until_ready(step(pools, caches, ids, ids)),
            jax.errors.JaxRuntimeError,
            "PageIndexError",
            "entries rejected: 1",
        )
        return
    jax.block_until_ready(step(pools, caches, ids, ids))
    assert_rejected(jaxkv.check_errors, jaxkv.PageIndexError, "1000")


def test_groups_with_keys_of_several_types_are_named():
    state, ids = {"a": None, 1: None}, {"a": [0], 1: [0], 2: [0]}
    call = partial(jaxkv.load_pages, state, state, ids, ids)  # type: ignore[arg-type]
    assert_rejected(call, ValueError, "groups of host_pages, [1, 2, 'a'], got [1, 'a']")
