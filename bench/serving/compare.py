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
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from bench.harness.records import REPOSITORY, Results
from bench.serving import metrics, systems, workloads
from bench.serving.metrics import RATE, Figures
from bench.serving.systems import COPY_ENGINE, DEVICE_PUT, JAXKV, RECOMPUTE, Memory
from examples.serving.engine import Limits
from examples.serving.model import PRESETS, Config, Params, init_params

WORKLOADS = ("multi_turn", "trace", "random")
SAMPLE = REPOSITORY / "bench" / "data" / "mooncake_conversation_sample.jsonl"
HBM_SHARE = 4


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", metavar="DIR", help="also write the JSON file below DIR")
    add("--quick", action="store_true", help="fewer clients, a smaller model")
    add("--tiny", action="store_true", help="a tiny model in float32, for any device")
    add("--workload", choices=WORKLOADS, nargs="+", default=WORKLOADS)
    add("--system", choices=systems.NAMES, nargs="+", default=systems.NAMES)
    add("--model", choices=[*PRESETS], help="shape of the random weights")
    add("--page-size", type=int, nargs="+", help="tokens; 2 KiB each in a block of Qwen3")
    add("--clients", type=int, default=48)
    add("--rounds", type=int, default=5)
    add("--request-length", type=int, default=512)
    add("--answer-length", type=int, default=64)
    add("--parallel", type=int, default=16, help="requests in flight")
    add("--rate", type=float, help="requests per second; default: no limit")
    add("--trace", type=Path, default=SAMPLE, help="file in the format of Mooncake's traces")
    flags = parser.parse_args(argv)
    flags.tiny |= jax.default_backend() == "cpu"
    if flags.tiny:
        flags.clients, flags.rounds, flags.parallel = 6, 3, 2
        flags.request_length, flags.answer_length = 40, 4
    elif flags.quick:
        flags.clients, flags.rounds = 16, 3
    flags.model = flags.model or (
        "tiny" if flags.tiny else "qwen3-0.6b" if flags.quick else "qwen3-8b"
    )
    flags.page_size = flags.page_size or ([8] if flags.tiny else [32, 4])
    return flags


def workload(name: str, flags: argparse.Namespace, vocab: int) -> workloads.Workload:
    parallel = flags.parallel
    if name == "multi_turn":
        lengths = flags.request_length, flags.answer_length
        return workloads.multi_turn(
            flags.clients, flags.rounds, *lengths, parallel, vocab, flags.rate
        )
    if name == "trace":
        count, scale = (4, 64) if flags.tiny else (flags.clients, 8)
        return workloads.trace(flags.trace, count, 40, scale, parallel, vocab)
    count, length, answer = (4, 40, 4) if flags.tiny else (2 * flags.clients, 1024, 128)
    return workloads.random_prompts(count, length, answer, parallel, vocab)


def plan(work: workloads.Workload, page_size: int, tiny: bool) -> tuple[Limits, Memory]:
    """Limits of the scheduler, and the pages of the systems."""
    longest = -(-work.longest // page_size)
    parallel = work.parallel
    budget = 64 if tiny else 2048
    limits = Limits(
        page_size, parallel, budget + parallel, longest, copy_pages=8 if tiny else 4096 // page_size
    )
    everything = sum(-(-tokens // page_size) + 1 for tokens in work.sequences) + parallel
    few = max(everything // HBM_SHARE, longest)
    return limits, Memory(everything, few, everything)


def measure(
    results: Results, name: str, page_size: int, flags: argparse.Namespace,
    model: tuple[Config, Params],
) -> None:  # fmt: skip
    config, params = model
    work = workload(name, flags, config.vocab_size)
    limits, memory = plan(work, page_size, flags.tiny)
    case = f"{name}, pages of {page_size}"
    print(f"{case}: {memory}, {limits}", flush=True)
    runs: dict[str, Figures] = {}
    answers: dict[str, list[list[int]]] = {}
    for system in flags.system:
        engine = systems.create(system, config, params, limits, memory)
        served = workloads.run(engine, work)
        runs[system] = metrics.figures(engine, served)
        # Clients of the same order, whatever the order of their answers.
        answers[system] = sorted(request.tokens for request in served)
        metrics.show(case, system, runs[system])
        systems.close(engine)
    metrics.record(results, case, runs)
    record_targets(results, name, case, runs, page_size)
    if params["norm"].dtype == "float32":
        metrics.target_tokens(results, case, answers)


def record_targets(
    results: Results, name: str, case: str, runs: dict[str, Figures], page_size: int
) -> None:
    rate = (RATE, "1/s")
    if name == "random":
        metrics.target(
            results, f"{case}: requests/s, jaxkv / no host tier", runs, rate,
            (JAXKV, RECOMPUTE), ">=", 0.99,
        )  # fmt: skip
    if name == "multi_turn":
        wanted = {DEVICE_PUT: 2.5, COPY_ENGINE: 2 if page_size < 16 else 1.3, RECOMPUTE: 2}
        for other, want in wanted.items():
            metrics.target(
                results, f"{case}: requests/s, jaxkv / {other}", runs, rate,
                (JAXKV, other), ">=", want,
            )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    flags = parse(argv)
    config = PRESETS[flags.model]
    params = init_params(config, 0, "float32" if flags.tiny else "bfloat16")
    results = Results("serving_tiny" if flags.tiny else "serving")
    for name in flags.workload:
        # Small pages are a case of the transfers, measured where they matter.
        for page_size in flags.page_size if name == "multi_turn" else flags.page_size[:1]:
            measure(results, name, page_size, flags, (config, params))
    results.save(flags.out)
    return metrics.exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
