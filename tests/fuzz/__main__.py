"""Random cases of every operation, each compared with its NumPy reference:
`python -m tests.fuzz --cases 5000 [--op load ...] [--seed 0]`.

Operations are compiled for few shapes; ids, layouts' contents, values and lengths are random.
Prints a table, and exits with 1 if a case failed. On a GPU, writes the record `fuzz`.
"""

import argparse
import os
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

from bench.harness.records import Results
from tests.fuzz import copies, others

OPERATIONS: dict[str, Callable[[np.random.Generator], Iterator[None]]] = {
    "load": copies.pages("load"),
    "store": copies.pages("store"),
    "load, some tokens": copies.pages("load", tokens=True),
    "store, some tokens": copies.pages("store", tokens=True),
    "start_load": copies.pages("load", started=True),
    "start_store": copies.pages("store", started=True),
    "swap": copies.blocks(),
    "start_swap": copies.blocks(started=True),
    "sparse fetch": others.sparse_fetch,
    "sparse append": others.sparse_append,
    "recurrent": others.recurrent,
    "all_reduce": others.all_reduce,
    "metadata": others.metadata,
}
SHOWN = 3  # failures of an operation that are printed
ON_A_GPU = 1000  # cases of an operation, at least


class Count(NamedTuple):
    cases: int
    failures: int
    seconds: float


def fuzz(name: str, cases: int, seed: int) -> Count:
    """Runs the cases of one operation, and prints the first failures.

    Each failure ends a sequence of cases, whose seed is printed; the next begins with a seed of its
    own.
    """
    done = failures = 0
    begin = time.monotonic()
    while done < cases:
        sequence = OPERATIONS[name](np.random.default_rng([seed, failures]))
        first = done
        try:
            while done < cases:
                next(sequence)
                done += 1
        except StopIteration:
            break
        except Exception:
            if failures < SHOWN:
                print(f"{name}: case {done - first} of seed [{seed}, {failures}]")
                traceback.print_exc(file=sys.stdout)
            done, failures = done + 1, failures + 1
    return Count(done, failures, time.monotonic() - begin)


def record(counts: dict[str, Count], seed: int) -> Results:
    results = Results("fuzz")
    for name, count in counts.items():
        results.row(name, f"cases, seed {seed}", "cases", count.cases)
        results.row(name, f"failures, seed {seed}", "cases", count.failures)
    run = [count.cases for count in counts.values() if count.cases]
    failures = sum(count.failures for count in counts.values())
    results.check("failures of all operations", failures, "==", 0, "cases")
    results.check("cases of each operation", min(run, default=0), ">=", ON_A_GPU, "cases")
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=5000, help="of each operation")
    parser.add_argument("--op", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", metavar="DIR", help="also write the JSON file below DIR")
    flags = parser.parse_args(argv)
    if jax.default_backend() == "cpu":
        # As in the tests: compilation would take longer than the programs.
        jax.config.update("jax_disable_most_optimizations", True)
    warnings.filterwarnings("ignore", "Some donated buffers")
    counts = {}
    for name in flags.op:
        counts[name] = fuzz(name, flags.cases, flags.seed)
        print(f"{name}: {counts[name].seconds:.0f} s", file=sys.stderr, flush=True)
    print("| operation | cases | failures | seed |\n| --- | --- | --- | --- |")
    for name, count in counts.items():
        cases = count.cases or f"0: {jax.device_count()} devices"
        print(f"| {name} | {cases} | {count.failures} | {flags.seed} |")
    if jax.default_backend() == "gpu" and flags.op == list(OPERATIONS):
        record(counts, flags.seed).save(flags.out)
    return int(any(count.failures for count in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
