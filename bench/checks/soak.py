"""Everything mixed, for a long time: `python -m bench.checks.soak --minutes 30`.

Random transfers, started copies, swaps, sparse rows, recurrent states and, with several devices,
all-reduces, each compared with its reference (`tests/fuzz`); pools that are created and closed; and
errors in scopes. Meanwhile the memory, descriptors and threads of the process are sampled: after a
warm-up they must not grow. Exits with 1 after a wrong result or a growth.

On a GPU, each run adds a segment to the record `soak` as long as the commit is the same: several
runs of nine minutes count as one of their total.
"""

import argparse
import gc
import itertools
import json
import os
import pathlib
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

if __name__ == "__main__":  # not in the tests, whose child processes would inherit it
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import numpy as np

import jaxkv
from bench.harness.records import RESULTS, Results, Row, device_slug, revision
from tests.fuzz.__main__ import OPERATIONS
from tests.fuzz.copies import RENEWED
from tests.util.layout_reference import LAYOUTS
from tests.util.transfer_cases import distinct_ids, donating, make_case

SAMPLES = 120  # in a segment
# Calls of each activity before the first sample: enough to compile all of its programs.
WARM_UP_CALLS = 200
WARM_UP = 0.2  # share of the samples that do not count
MINUTES = 30  # of all segments
MIB = 1 << 20
# Growth within a segment, after the warm-up, that counts as noise: of the allocators of Python, of
# glibc and of the device. Descriptors and threads are exact counts: one more is a leak.
LIMITS = {
    "resident memory": (16.0, "MiB"),
    "device memory": (1.0, "MiB"),
    "descriptors": (0.5, "count"),
    "threads": (0.5, "count"),
}


class Segment(NamedTuple):
    """One run: its length, calls by name, wrong ones, and growth by resource."""

    minutes: float
    calls: int
    failures: int
    growth: dict[str, float]


# ---- What runs -----------------------------------------------------------------------------------


def pools(rng: np.random.Generator) -> Iterator[None]:
    """A pool and a cache are created, written, read and closed."""
    cases = [make_case(layout, seed=seed) for seed, layout in enumerate(LAYOUTS["mha"][:3])]
    store, load = donating("store"), donating("load")
    while True:
        case = cases[int(rng.integers(len(cases)))]
        pool, cache = case.pool(), case.cache()
        ids = distinct_ids(case, 4, int(rng.integers(2**31)))
        pool = store(pool, cache, *ids)
        cache = load(pool, cache, ids[0], np.roll(ids[1], 1))
        jaxkv.check_errors(cache)
        stored = case.expected("store", *ids)["host"]
        middle = type(case)(case.layout, stored, case.device)
        middle.assert_holds(pool, cache, **middle.expected("load", ids[0], np.roll(ids[1], 1)))
        pool.close()
        yield


def errors(rng: np.random.Generator) -> Iterator[None]:
    """A wrong id: an error of its scope only."""
    case = make_case()
    scopes = [jaxkv.ErrorScope(f"soak-{number}") for number in range(3)]
    load = jax.jit(jaxkv.load_pages)
    for call in itertools.count():
        if call % RENEWED == 0:
            pool, cache = case.pool(), case.cache()
        scope = scopes[int(rng.integers(len(scopes)))]
        wrong = np.array([int(rng.integers(12, 2**31)), 1], np.int32)
        try:
            with scope:
                out = load(pool, cache, wrong, np.array([0, 1], np.int32))
            scope.check_errors(out)
        except (jaxkv.PageIndexError, jax.errors.JaxRuntimeError, ValueError) as error:
            assert str(wrong[0]) in str(error), error
        else:
            raise AssertionError(f"page {wrong[0]} of 12 is no error")
        jaxkv.check_errors()
        yield


ACTIVITIES: dict[str, Callable[[np.random.Generator], Iterator[None]]] = {
    **{name: cases for name, cases in OPERATIONS.items() if name != "metadata"},
    "pools": pools,
    "errors": errors,
}


# ---- What is sampled -----------------------------------------------------------------------------


def sample() -> dict[str, float]:
    """Resources of this process, in the units of `LIMITS`."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return {
        "resident memory": pages * os.sysconf("SC_PAGE_SIZE") / MIB,
        "device memory": sum(of.get("bytes_in_use", 0) for of in stats) / MIB,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def growth(samples: Sequence[float]) -> float:
    """From the first to the last sample after the warm-up, by the median of all slopes: a single
    outlier does not matter (Theil and Sen)."""
    steady = samples[int(len(samples) * WARM_UP) :]
    slopes = [
        (b - a) / (j - i) for i, a in enumerate(steady) for j, b in enumerate(steady) if j > i
    ]
    return statistics.median(slopes) * (len(steady) - 1) if slopes else 0.0


# ---- Runs and their record -----------------------------------------------------------------------


def soak(minutes: float, seed: int = 0) -> Segment:
    """Runs all activities in random order, and prints failures."""
    rng = np.random.default_rng(seed)
    running = {name: make(rng) for name, make in ACTIVITIES.items()}
    samples: list[dict[str, float]] = []
    first = [name for name in ACTIVITIES for _ in range(WARM_UP_CALLS)]
    calls = failures = 0
    begin = sampled = time.monotonic()
    while (now := time.monotonic()) - begin < minutes * 60:
        if not first and now - sampled >= minutes * 60 / SAMPLES:
            gc.collect()
            samples.append(sample())
            sampled = now
        name = first.pop() if first else [*running][int(rng.integers(len(running)))]
        if name not in running:
            continue
        try:
            next(running[name])
            calls += 1
        except StopIteration:  # too few devices
            print(f"not run: {name}, with {jax.device_count()} devices", flush=True)
            del running[name]
        except Exception:
            failures += 1
            traceback.print_exc(file=sys.stdout)
            running[name] = ACTIVITIES[name](rng)
    if len(samples) < SAMPLES // 4:
        raise ValueError(f"{minutes} minutes are too short: the warm-up took most of them")
    found = {name: growth([one[name] for one in samples]) for name in LIMITS}
    print(f"{calls} calls, {failures} wrong; at the end {samples[-1]}; growth {found}")
    return Segment(minutes, calls, failures, found)


def earlier(path: pathlib.Path, commit: str | None) -> list[Row]:
    """The rows of a record of the same commit."""
    if commit is None or not path.exists():
        return []
    content = json.loads(path.read_text())
    return [Row(**row) for row in content["rows"]] if content["commit"] == commit else []


def record(results: Results, rows: Sequence[Row], segment: Segment) -> bool:
    """Adds a segment to the rows of earlier ones; checks of all. Whether those of results are met.

    The length is a check of its own: a single short segment is right, but not enough.
    """
    number = len({row.case for row in rows}) + 1
    results.rows += rows
    case = f"segment {number}"
    results.row(case, "length", "minutes", segment.minutes)
    results.row(case, "calls", "calls", segment.calls)
    results.row(case, "wrong", "calls", segment.failures)
    for name, (_, unit) in LIMITS.items():
        results.row(case, f"growth of {name}", unit, segment.growth[name])

    def values(metric: str) -> list[float]:
        return [row.value for row in results.rows if row.metric == metric]

    checks = [results.check("wrong calls", sum(values("wrong")), "==", 0, "calls")]
    for name, (limit, unit) in LIMITS.items():
        most = max(values(f"growth of {name}"))
        checks.append(results.check(f"growth of {name} in a segment", most, "<=", limit, unit))
    results.check("length of all segments", sum(values("length")), ">=", MINUTES, "minutes")
    return all(check.met for check in checks)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--seed", type=int, help="by default the time")
    parser.add_argument("--out", metavar="DIR", help="also write the JSON file below DIR")
    flags = parser.parse_args(argv)
    warnings.filterwarnings("ignore", "Some donated buffers")
    seed = int(time.time()) if flags.seed is None else flags.seed
    print(f"seed {seed}", flush=True)
    segment = soak(flags.minutes, seed)
    results = Results("soak")
    on_a_gpu = jax.default_backend() == "gpu"
    path = RESULTS / device_slug() / "soak.json"
    rows = earlier(path, revision().commit) if on_a_gpu else []
    met = record(results, rows, segment)
    if on_a_gpu:
        results.save(flags.out)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
