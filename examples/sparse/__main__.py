"""Generates with sparse attention, with rows in HBM and in host memory, and compares the tokens.

The exit code is 0 only if the tokens are equal.
"""

import argparse
import sys
from collections.abc import Sequence

import numpy as np

from .engine import Engine, InHbm, InHostMemory, Sizes
from .model import Config, init_params


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.sparse", description=__doc__)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64, help="of each request")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts")
    args = parser.parse_args(argv)

    config, sizes, rng = Config(), Sizes(), np.random.default_rng(args.seed)
    params = init_params(config, args.seed)
    lengths = rng.integers(1, sizes.max_prompt + 1, args.requests)
    prompts = [rng.integers(0, config.vocab, length).tolist() for length in lengths]
    engines = [Engine(config, sizes, params, tier(config, sizes)) for tier in (InHbm, InHostMemory)]
    in_hbm, in_host_memory = (engine.generate(prompts, args.new_tokens) for engine in engines)

    for request, answer in enumerate(in_host_memory[:3]):
        print(f"request {request}: {' '.join(map(str, answer[:16]))} ...")
    reuse = 1 - engines[1].missing / engines[1].chosen
    equal = in_hbm == in_host_memory
    print(f"{sum(map(len, in_host_memory))} tokens of {args.requests} requests")
    print(
        f"rows in HBM: {sizes.slots} of up to {sizes.max_length} of each request and layer; "
        f"{reuse:.0%} of the chosen ones were there"
    )
    print(f"tokens {'equal' if equal else 'DIFFER from'} those with all rows in HBM")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
