"""Systems of KV offload on one serving engine: `python -m bench.serving.compare`.

Workloads (`--workload`), each served by all systems (`--system`; bench.serving.systems):

  multi_turn  conversations with the parameters of SGLang's HiCache benchmark; HBM holds a quarter
              of their pages. Also in small pages by the copy engine and by jaxkv
  trace       whole sessions of Mooncake's conversation trace, lengths divided by a factor
  random      prompts without reuse

Requests are served at saturation, unless --rate is given: "requests/s" is the highest rate for the
number of requests in flight, which is the same for all systems. Weights are random, in the shape of
a Qwen3 model. `--tiny` runs everything with a tiny float32 model, in which tokens must be equal.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from bench.harness.records import REPOSITORY
from bench.serving import runs, systems, workloads
from bench.serving.runs import RATE, Case, Wanted
from bench.serving.systems import COPY_ENGINE, DEVICE_PUT, IN_HBM, JAXKV, RECOMPUTE, Memory
from examples.serving.engine import Limits
from examples.serving.presets import PRESETS

WORKLOADS = ("multi_turn", "trace", "random")
SAMPLE = REPOSITORY / "bench" / "data" / "mooncake_conversation_sample.jsonl"
HBM_SHARE = 4
REPEATS = {"multi_turn": 3, "trace": 3, "random": 5}
WANTED = {  # by page size of tokens; 2 KiB each in a block of Qwen3
    32: (
        Wanted("multi_turn", RATE, DEVICE_PUT, ">=", 2.5),
        Wanted("multi_turn", RATE, COPY_ENGINE, ">=", 1.3),
        Wanted("multi_turn", RATE, RECOMPUTE, ">=", 2),
        Wanted("random", RATE, RECOMPUTE, ">=", 0.99),
    ),
    4: (Wanted("multi_turn", RATE, COPY_ENGINE, ">=", 2),),
}


def cases(flags: argparse.Namespace) -> list[Case]:
    flags.model = flags.model or (
        "tiny" if flags.tiny else "qwen3-0.6b" if flags.quick else "qwen3-8b"
    )
    short = flags.tiny and flags.quick
    names = flags.workload or (WORKLOADS[:1] if short else WORKLOADS)
    if flags.tiny:
        chosen = flags.system or ((IN_HBM, JAXKV) if short else systems.NAMES)
        return [case(flags, 8, names, chosen, ())]
    chosen = flags.system or systems.NAMES
    found = [case(flags, 32, names, chosen, WANTED[32])]
    if "multi_turn" in names:
        pair = [system for system in chosen if system in (COPY_ENGINE, JAXKV)]
        found.append(case(flags, 4, ["multi_turn"], pair, WANTED[4]))
    return found


def case(
    flags: argparse.Namespace, page_size: int, names: Sequence[str], chosen: Sequence[str],
    wanted: Sequence[Wanted],
) -> Case:  # fmt: skip
    """Limits and memory for all workloads; HBM by the first, the conversations if these run."""
    makers = {name: partial(workload, name, flags) for name in names}
    works = [make(0) for make in makers.values()]
    longest = max(-(-work.longest // page_size) for work in works)
    budget, new = (64, 48) if flags.tiny else (2176, 1088)
    # Steps with the new tokens of one request; loads of a few thousand tokens in one step.
    limits = Limits(
        page_size, flags.parallel, budget + flags.parallel, longest,
        copy_pages=8 if flags.tiny else 8192 // page_size, token_buckets=(new + flags.parallel,),
    )  # fmt: skip
    everything = [
        sum(-(-tokens // page_size) + 1 for tokens in work.sequences) + flags.parallel
        for work in works
    ]
    few = max(everything[0] // HBM_SHARE, longest)
    memory = Memory(max(everything), few, max(everything))
    label, dtype = f"{{}}, pages of {page_size}", "float32" if flags.tiny else "bfloat16"
    repeated: dict[str, Callable[[int], workloads.Workload | workloads.BesideLoads]] = {**makers}
    repeats = {} if flags.tiny else REPEATS
    return Case(label, chosen, limits, memory, repeated, repeats, wanted, flags.model, dtype)


def workload(name: str, flags: argparse.Namespace, repeat: int) -> workloads.Workload:
    vocab, parallel = PRESETS[flags.model].vocab_size, flags.parallel
    if name == "multi_turn":
        clients, rounds, request, answer = 20, 8, 1024, 16
        if flags.tiny:
            clients, rounds, request, answer = 6, 3, 40, 4
        elif flags.quick:
            clients, rounds = 12, 4
        shape = clients, rounds, request, answer
        return workloads.multi_turn(*shape, parallel, vocab, flags.rate, seed=repeat)
    if name == "trace":
        sessions, scale = (4, 64) if flags.tiny else (24, 4)
        return workloads.trace(flags.trace, sessions, 40, scale, parallel, vocab, repeat)
    count, length, answer = (4, 40, 4) if flags.tiny else (32, 1024, 32)
    return workloads.random_prompts(count, length, answer, parallel, vocab, 100 + repeat)


def main(argv: Sequence[str] | None = None) -> int:
    parser = runs.parser(__doc__)
    add = parser.add_argument
    add("--workload", choices=WORKLOADS, nargs="+", help="default: all")
    add("--parallel", type=int, default=4, help="requests in flight")
    add("--rate", type=float, help="requests per second; default: no limit")
    add("--trace", type=Path, default=SAMPLE, help="file in the format of Mooncake's traces")
    return runs.main("serving", parser, argv, cases, "bench.serving.compare")


if __name__ == "__main__":
    sys.exit(main())
