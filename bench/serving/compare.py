"""Systems of KV offload on one serving engine: `python -m bench.serving.compare`.

Workloads (`--workload`), each served by all systems (`--system`; bench.serving.systems):

  multi_turn  conversations with the parameters of SGLang's HiCache benchmark; HBM holds a quarter
              of their pages
  trace       whole sessions of Mooncake's conversation trace, lengths divided by a factor
  random      prompts without reuse

Requests are served at saturation, unless --rate is given: "requests/s" is the highest rate for the
number of requests in flight, which is the same for all systems. Weights are random, in the shape of
a Qwen3 model. `--tiny` runs everything with a tiny float32 model, in which tokens must be equal.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from bench.harness.records import REPOSITORY, Results
from bench.serving import metrics, systems, workloads
from bench.serving.metrics import RATE, Figures
from bench.serving.systems import COPY_ENGINE, DEVICE_PUT, IN_HBM, JAXKV, RECOMPUTE, Memory
from examples.serving.engine import Limits
from examples.serving.model import PRESETS, Config, Params, init_params

WORKLOADS = ("multi_turn", "trace", "random")
SAMPLE = REPOSITORY / "bench" / "data" / "mooncake_conversation_sample.jsonl"
HBM_SHARE = 4
REPEATS = {"random": 5}  # with other prompts, as its target is near 1; other figures: the first


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", metavar="DIR", help="also write the JSON file below DIR")
    add("--quick", action="store_true", help="fewer clients, a smaller model")
    add("--tiny", action="store_true", help="a tiny model in float32, for any device")
    add("--workload", choices=WORKLOADS, nargs="+", help="default: all")
    add("--system", choices=systems.NAMES, nargs="+", help="default: all")
    add("--model", choices=[*PRESETS], help="shape of the random weights")
    add("--page-size", type=int, nargs="+", help="tokens; 2 KiB each in a block of Qwen3")
    add("--clients", type=int, default=20)
    add("--rounds", type=int, default=8)
    add("--request-length", type=int, default=1024)
    add("--answer-length", type=int, default=16)
    add("--parallel", type=int, default=4, help="requests in flight")
    add("--rate", type=float, help="requests per second; default: no limit")
    add("--trace", type=Path, default=SAMPLE, help="file in the format of Mooncake's traces")
    flags = parser.parse_args(argv)
    on_cpu = jax.default_backend() == "cpu"
    flags.name = "serving_tiny" if flags.tiny and not on_cpu else "serving"
    flags.tiny |= on_cpu
    short = on_cpu and flags.quick
    flags.workload = flags.workload or (WORKLOADS[:1] if short else WORKLOADS)
    flags.system = flags.system or ((IN_HBM, JAXKV) if short else systems.NAMES)
    if flags.tiny:
        flags.clients, flags.rounds, flags.parallel = 6, 3, 2
        flags.request_length, flags.answer_length = 40, 4
    elif flags.quick:
        flags.clients, flags.rounds = 12, 4
    flags.model = flags.model or (
        "tiny" if flags.tiny else "qwen3-0.6b" if flags.quick else "qwen3-8b"
    )
    flags.page_size = flags.page_size or ([8] if flags.tiny else [32, 4])
    return flags


def workload(
    name: str, flags: argparse.Namespace, vocab: int, repeat: int = 0
) -> workloads.Workload:
    parallel = flags.parallel
    if name == "multi_turn":
        lengths = flags.request_length, flags.answer_length
        return workloads.multi_turn(
            flags.clients, flags.rounds, *lengths, parallel, vocab, flags.rate
        )
    if name == "trace":
        sessions, scale = (4, 64) if flags.tiny else (24, 4)
        return workloads.trace(flags.trace, sessions, 40, scale, parallel, vocab)
    count, length, answer = (4, 40, 4) if flags.tiny else (32, 1024, 32)
    return workloads.random_prompts(count, length, answer, parallel, vocab, 1 + repeat)


def plan(works: Sequence[workloads.Workload], page_size: int, tiny: bool) -> tuple[Limits, Memory]:
    """Limits of the scheduler, and the pages of the systems: for all workloads, by the first.

    The other workloads have fewer tokens than the conversations, if these run too.
    """
    longest = max(-(-work.longest // page_size) for work in works)
    parallel = works[0].parallel
    budget, new = (64, 48) if tiny else (2176, 1088)
    # Steps with the new tokens of one request; loads of a few thousand tokens in one step.
    limits = Limits(
        page_size, parallel, budget + parallel, longest,
        copy_pages=8 if tiny else 8192 // page_size, token_buckets=(new + parallel,),
    )  # fmt: skip
    everything = [
        sum(-(-tokens // page_size) + 1 for tokens in work.sequences) + parallel for work in works
    ]
    few = max(everything[0] // HBM_SHARE, longest)
    return limits, Memory(max(everything), few, max(everything))


def measure(
    results: Results, names: Sequence[str], page_size: int, flags: argparse.Namespace,
    model: tuple[Config, Params],
) -> None:  # fmt: skip
    """Serves the workloads by one engine of each system, one after the other."""
    config, params = model
    works = {name: workload(name, flags, config.vocab_size) for name in names}
    limits, memory = plan([*works.values()], page_size, flags.tiny)
    print(f"pages of {page_size}: {memory}, {limits}", flush=True)
    runs: dict[str, dict[str, Figures]] = {name: {} for name in names}
    answers: dict[str, dict[str, list[list[int]]]] = {name: {} for name in names}
    rates: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for system in flags.system:
        engine = systems.create(system, config, params, limits, memory)
        for name, work in works.items():
            served = workloads.run(engine, work)
            runs[name][system] = metrics.figures(engine, served)
            # Clients of the same order, whatever the order of their answers.
            answers[name][system] = sorted(request.tokens for request in served)
            rates[name][system] = [runs[name][system][RATE, "1/s"]]
            for repeat in range(1, REPEATS.get(name, 1)):
                again = workload(name, flags, config.vocab_size, repeat)
                found = metrics.figures(engine, workloads.run(engine, again))
                rates[name][system].append(found[RATE, "1/s"])
            runs[name][system][RATE, "1/s"] = statistics.median(rates[name][system])
            metrics.show(case_of(name, page_size), system, runs[name][system])
        systems.close(engine)
    for name in names:
        case = case_of(name, page_size)
        metrics.record(results, case, runs[name])
        record_targets(results, name, case, rates[name], page_size)
        if params["norm"].dtype == "float32":
            metrics.target_tokens(results, case, answers[name])


def case_of(workload: str, page_size: int) -> str:
    return f"{workload}, pages of {page_size}"


def record_targets(
    results: Results, name: str, case: str, rates: dict[str, list[float]], page_size: int
) -> None:
    small = page_size < 16
    wanted = {
        "random": {RECOMPUTE: 0.99},
        "multi_turn": {DEVICE_PUT: 2.5, COPY_ENGINE: 2 if small else 1.3, RECOMPUTE: 2},
    }
    for other, want in wanted.get(name, {}).items():
        label = f"{case}: requests/s, {JAXKV} / {other}"
        metrics.target(results, label, rates, (JAXKV, other), ">=", want)


def main(argv: Sequence[str] | None = None) -> int:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    flags = parse(argv)
    config = PRESETS[flags.model]
    params = init_params(config, 0, "float32" if flags.tiny else "bfloat16")
    results = Results(flags.name)
    for page_size in flags.page_size:
        # Smaller pages are a case of the transfers: only where these matter.
        names = flags.workload if page_size == flags.page_size[0] else ["multi_turn"]
        if set(names) <= set(flags.workload):
            measure(results, names, page_size, flags, (config, params))
            results.save(flags.out)  # after each, as the next may not fit into the time
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
