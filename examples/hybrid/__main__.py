"""Generates with a small hybrid model and draft tokens: asynchronous and synchronous scheduling.

The exit code is 0 only if both runs produce bitwise identical tokens, recurrent states, keys and
values, and the host syncs of the asynchronous run are limited to reading the counts of one step
while the device runs the next.
"""

import argparse
import sys
from collections.abc import Sequence

import jax
import numpy as np

import jaxkv

from .engine import Start, run_async, run_sync
from .model import Config, init_params


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.hybrid", description=__doc__)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=96, help="of each request")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts")
    args = parser.parse_args(argv)

    config, rng = Config(), np.random.default_rng(args.seed)
    params = init_params(config, args.seed)
    lens = rng.integers(1, 3 * config.block_size, args.requests)
    prompts = [rng.integers(0, config.vocab, length).tolist() for length in lens]
    start = Start.of(config, prompts, args.new_tokens)

    with jaxkv.forbid_host_sync(mode="count") as report:
        asynchronous = run_async(config, params, start)
    synchronous = run_sync(config, params, start)
    jaxkv.check_errors(asynchronous.cache, synchronous.cache)

    answers = asynchronous.answers(start.requests)
    for request, answer in enumerate(answers[:3]):
        print(f"request {request}: {' '.join(map(str, answer[:16]))} ...")
    equal = answers == synchronous.answers(start.requests) and all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(
            jax.tree.leaves(asynchronous.cache), jax.tree.leaves(synchronous.cache), strict=True
        )
    )
    allowed = len(report.syncs) - report.count
    steps, saves = asynchronous.steps, asynchronous.saves
    print(f"{sum(map(len, answers))} tokens of {len(answers)} requests in {steps} steps")
    print(f"states saved after {saves} steps, skipped after {steps - saves}")
    print(
        f"tokens, states, keys and values {'equal' if equal else 'DIFFER from'} those of the "
        "synchronous run"
    )
    print(f"host syncs: {report.count}; reads of counts while the next step runs: {allowed}")
    return 0 if equal and not report.count else 1


if __name__ == "__main__":
    sys.exit(main())
