"""Checks buffer lifetimes in many random programs: `python -m tests.util.random_programs 2000`.

Each seed gives a program that starts copies and one that takes a handle of another program. Prints
the number of programs by kind, and exits with 1 if a buffer of one is not safe.
"""

import collections
import sys
import warnings

import jax

from tests.util.implementations import IMPLEMENTATIONS
from tests.util.lowered_copies import Program
from tests.util.transfer_cases import make_case


def main(num_seeds: int) -> int:
    warnings.filterwarnings("ignore", "Some donated buffers")
    case, counts = make_case(), collections.Counter[str]()
    named = next(name for name in IMPLEMENTATIONS[jax.default_backend()] if name != "pallas")
    unsafe = 0
    for seed in range(num_seeds):
        for kind in ("lowered", "continued"):
            program = Program(case, named, seed)
            module = getattr(program, kind)()
            delayed = any(module.joined) or module.boundary_waits > 0
            shape = "plain" if program.plain else "crossing"
            end = "complete" if program.complete else "partial"
            counts[f"{kind}, {shape}, {end}, {'delayed' if delayed else 'asynchronous'}"] += 1
            for line in module.violations(seed):
                unsafe += 1
                print(f"seed {seed}, {kind}: {line}")
    for label, count in sorted(counts.items()):
        print(f"{count:6} {label}")
    print(f"{2 * num_seeds} programs, {unsafe} violations")
    return 1 if unsafe else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
