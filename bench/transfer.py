"""Bandwidth of page copies, as a share of one contiguous copy's: `python -m bench.transfer`.

Every page of a pool and of a cache takes part, in random order, so that nothing is contiguous by
chance. GB/s is bytes of payload (1e9) over time. The peer is plain JAX: gather the pages, stack
them and `device_put` the whole, or the way back, which needs HBM for a second copy of the pages.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from bench import roof
from bench.results import Results, Row, arguments
from bench.timing import seconds_per_call
from jaxkv.layout import HostLayout

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAYOUTS = ("page_first_direct", "page_first", "layer_first")
IMPLEMENTATIONS = {"cpu": ("host",), "gpu": ("kernel", "dma")}
DIRECTIONS = ("load", "store")
WANTED_SHARE = 0.9
# More descriptors than this in one submission say more about the host thread than about the link.
MAX_DMA_DESCRIPTORS = 32768


class Size(NamedTuple):
    """How much is copied and in what pieces."""

    spec: jaxkv.KVCacheSpec
    num_pages: int
    calls: int
    repeats: int

    @property
    def nbytes(self) -> int:
        return self.num_pages * self.spec.page_bytes

    @property
    def label(self) -> str:
        return f"{self.spec.block_bytes / 1024:g} KiB blocks"


def sizes(platform: str, quick: bool) -> list[Size]:
    """Blocks (one page of one layer's K or V) of several sizes, the same payload for each."""
    if platform == "cpu":
        shapes, payload, effort = [(4, 1), (16, 2)], 1 << 20, (2, 3)
    else:
        shapes, payload, effort = [(16, 1), (16, 4), (64, 8)], 1 << 29, (5, 7)
    if quick:
        shapes, effort = shapes[-1:], (2, 3)
    specs = [
        jaxkv.KVCacheSpec(
            num_layers=8, page_size=tokens, num_kv_heads=heads, head_dim=128, dtype=jnp.bfloat16
        )
        for tokens, heads in shapes
    ]
    return [Size(spec, payload // spec.page_bytes, *effort) for spec in specs]


def copy_rate(size: Size, layout: str, implementation: str, direction: str) -> float:
    """GB/s of one implementation; raises what jaxkv raises where it refuses the call."""
    pool = jaxkv.HostPool.create(size.spec, num_pages=size.num_pages, layout=layout)
    cache = _random_cache(size)
    ids = [_ids(size, implementation, seed) for seed in (1, 2)]

    @functools.partial(jax.jit, donate_argnames=("cache",))
    def load(cache: Any, pool: Any, host_pages: Any, device_pages: Any) -> Any:
        return jaxkv.load_pages(
            pool, cache, host_pages, device_pages, implementation=implementation
        )

    @functools.partial(jax.jit, donate_argnames=("pool",))
    def store(pool: Any, cache: Any, host_pages: Any, device_pages: Any) -> Any:
        return jaxkv.store_pages(
            pool, cache, device_pages, host_pages, implementation=implementation
        )

    pool = store(pool, cache, *ids)  # random bytes in both memories
    if direction == "load":
        seconds, _ = _time(size, lambda cache: load(cache, pool, *ids), cache)
    else:
        seconds, pool = _time(size, lambda pool: store(pool, cache, *ids), pool)
    jaxkv.check_errors()
    pool.release()
    return size.nbytes / seconds / 1e9


def plain_jax_rate(size: Size, direction: str) -> float:
    """GB/s of gather, stack and `device_put` (store), or of `device_put` and scatter (load)."""
    cache, ids = _random_cache(size), _ids(size, "kernel", 1)
    device = jax.local_devices()[0]
    on_host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    on_device = jax.sharding.SingleDeviceSharding(device)

    @jax.jit
    def gather(cache: Any, ids: jax.Array) -> jax.Array:
        return jnp.stack([buffer[ids] for buffer in jax.tree.leaves(cache)])

    @functools.partial(jax.jit, donate_argnames=("cache",))
    def scatter(cache: Any, staged: jax.Array, ids: jax.Array) -> Any:
        leaves, tree = jax.tree.flatten(cache)
        written = [leaf.at[ids].set(pages) for leaf, pages in zip(leaves, staged, strict=True)]
        return jax.tree.unflatten(tree, written)

    staged = jax.device_put(gather(cache, ids), on_host)
    if direction == "load":
        step = lambda cache: scatter(cache, jax.device_put(staged, on_device), ids)  # noqa: E731
        seconds, _ = _time(size, step, cache)
    else:
        # Nothing chains these calls, so each is waited for: only the last would be otherwise.
        step = lambda _: jax.block_until_ready(jax.device_put(gather(cache, ids), on_host))  # noqa: E731
        seconds, _ = _time(size, step, staged)
    return size.nbytes / seconds / 1e9


def _time(size: Size, step: Callable[[Any], Any], state: Any) -> tuple[float, Any]:
    return seconds_per_call(step, state, calls=size.calls, repeats=size.repeats)


def _random_cache(size: Size) -> Any:
    """A cache of random bytes: copies of zeros can be faster than copies of real data."""
    cache = jaxkv.DeviceCache.create(size.spec, num_pages=size.num_pages)
    leaves, tree = jax.tree.flatten(cache)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    fresh = [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, fresh)


def _ids(size: Size, implementation: str, seed: int) -> Any:
    pages = np.random.default_rng(seed).permutation(size.num_pages).astype(np.int32)
    return jaxkv.HostIds(pages) if implementation == "dma" else jnp.asarray(pages)


def refusal(size: Size, layout: str, implementation: str) -> str | None:
    """Why a combination is not worth its time here, None if it is."""
    if implementation != "dma":
        return None
    pages = np.arange(size.num_pages)
    host = HostLayout(size.spec, layout, size.num_pages)
    count = len(host.descriptors(pages, np.random.default_rng(0).permutation(pages)))
    if count <= MAX_DMA_DESCRIPTORS:
        return None
    return f"{count} descriptors, more than {MAX_DMA_DESCRIPTORS} in one submission"


def measure(results: Results, platform: str, quick: bool) -> None:
    for size in sizes(platform, quick):
        for direction in DIRECTIONS:
            link = roof.contiguous_copy(direction, size.nbytes)
            peers = {"plain JAX": plain_jax_rate(size, direction)}
            best = 0.0
            for layout in LAYOUTS:
                for implementation in IMPLEMENTATIONS[platform]:
                    case = f"{direction}, {layout}, {implementation}, {size.label}"
                    if reason := refusal(size, layout, implementation):
                        print(f"{case}: left out: {reason}", flush=True)
                        continue
                    rate = copy_rate(size, layout, implementation, direction)
                    row = results.row(case, "bandwidth", "GB/s", rate, link, peers)
                    print(text(row), flush=True)
                    if layout == LAYOUTS[0]:
                        best = max(best, rate)
            if platform == "gpu":
                name = f"{direction}, {LAYOUTS[0]}, {size.label}: the faster implementation"
                results.target(name, best / link[1], ">=", WANTED_SHARE, "of roof")


def text(row: Row) -> str:
    assert row.roof
    peers = ", ".join(f"{name} {value:.3g}" for name, value in row.peers.items())
    share = row.value / row.roof["value"]
    return (
        f"{row.case:50} {row.value:6.1f} GB/s  {share:4.0%} of {row.roof['value']:.1f} "
        f"({row.roof['name']})  [{peers}]"
    )


def figure(rows: Sequence[Row]) -> "Figure":
    """Bars of GB/s per case and lines for the roofs, one panel a direction."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(10, 1 + 0.22 * len(rows)), layout="constrained")
    panels = drawn.subplots(1, len(DIRECTIONS), sharex=True)
    for panel, direction in zip(panels, DIRECTIONS, strict=True):
        chosen = [row for row in rows if row.case.startswith(direction)][::-1]
        panel.barh([row.case.partition(", ")[2] for row in chosen], [row.value for row in chosen])
        for value in {row.roof["value"] for row in chosen if row.roof}:
            panel.axvline(value, color="black", linestyle=":")
        panel.set(title=direction, xlabel="GB/s; dotted: contiguous copy")
    return drawn


def main(argv: Sequence[str] | None = None) -> int:
    flags = arguments(__doc__, argv, plot=True)
    results = Results("transfer")
    measure(results, jax.default_backend(), flags.quick)
    results.save(flags.out)
    if flags.plot:
        figure(results.rows).savefig(flags.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
