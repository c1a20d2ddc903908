"""The README's table of gains."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from bench.harness.records import File
from bench.harness.timing import Figure
from bench.report.tables import RATE, Line, lines, number, table

ENGINES = r"(?P<pages>\w+, \d+ layers x \d+ pages of \d+ KiB)"
LATENCY, REUSED = "latency (data available)", ", host memory reused"
TPU_INFERENCE, SGLANG, ALL_PAGES = "tpu-inference", "sglang-jax", "one device_put of all pages"
QWEN3_8B = "Qwen3-8B shapes, bfloat16"


class Gain(NamedTuple):
    """Rows of the table: jaxkv's time in a benchmark, compared with baselines.

    Attributes:
      bench: the benchmark.
      case: pattern of its cases; its groups fill `task` and `device`.
      metric: a time in milliseconds, or a rate per second.
      own: jaxkv's method.
      task, model: columns of the table.
      baselines: {text: names}; the fastest of the names, which are methods or baselines of the row.
      method: pattern of the method, after that of the case.
      device: column of the table.
    """

    bench: str
    case: str
    metric: str
    own: str
    task: str
    model: str
    baselines: dict[str, tuple[str, ...]]
    method: str = ", (?P<m>.+)"
    device: str = "{device}"


GAINS = (
    Gain(
        "serving_ttft", r"qwen3-8b, (?P<c>\d+ tokens cached, \d+ new)", "TTFT p50", "jaxkv",
        "time to first token, {0}", QWEN3_8B, {"recomputation": ("recompute",)},
    ),
    Gain(
        "serving", "multi_turn, pages of 32", RATE, "jaxkv",
        "multi-turn prompts, time per request at saturation", QWEN3_8B,
        {"recomputation": ("recompute",), "one `device_put` per page": ("device_put",)},
    ),
    Gain(
        "engines", ENGINES, LATENCY, "as chosen", "{0}", "MLA, latent of 512, bfloat16",
        {
            "one `device_put` per page ({name})": (TPU_INFERENCE, SGLANG),
            "one `device_put` of all pages, staged in HBM": (ALL_PAGES,),
        },
    ),
    Gain(
        "overlap", "(?P<s>.*-bound.*)", "time per step", "as chosen", "{0} loaded in it",
        "32 layers, bfloat16", {"load before the step": ("sequential",)}, ": (?P<m>.+)",
    ),
    Gain(
        "serving_decode", "scenario, qwen3-0.6b", "inter-token latency p50", "in HBM",
        "decode step of 32 requests", "Qwen3-0.6B shapes, bfloat16",
        {"metadata on the host, no step ahead": ("host metadata",)},
    ),
    Gain(
        "tensor_parallel", r"(?P<n>\d+) devices, .*(?P<b>batch 16)", "time per step", "",
        "decode step, {1}", "Qwen3-8B shapes, 12 layers, bfloat16", {"`psum`": ("psum",)}, "",
        "{0} x {device}",
    ),
)  # fmt: skip


def milliseconds(line: Line, gain: Gain, name: str) -> float:
    """Of a baseline or method; stores by `device_put` reuse host memory, as in a pool."""
    row = line[gain.metric, gain.own]
    others = {method: row.value for (metric, method), row in line.items() if metric == gain.metric}
    others |= row.baselines
    found = others.get(name + REUSED, others[name])
    return 1e3 / found if row.unit == "1/s" else found


def speedup(paired: Line, gain: Gain, name: str) -> Figure | None:
    """By the ratios of rounds, if the record has their error."""
    row = paired.get(("ratio", f"{gain.own} / {name}"))
    if row is None or not row.error:
        return None
    ratio = Figure(row.value, row.error)
    return ratio if gain.metric == RATE else 1 / ratio


def gains(files: Sequence[File]) -> str:
    """One row per task and baseline."""
    found = []
    for gain in GAINS:
        pairs = lines(files, gain.bench, rf"{gain.case}: {re.escape(gain.metric)}, (?P<m>.+)")
        for key, line in lines(files, gain.bench, gain.case + gain.method).items():
            if (gain.metric, gain.own) not in line:
                continue
            own = milliseconds(line, gain, gain.own)
            task, device = (
                text.format(*key[1:], device=key[0]) for text in (gain.task, gain.device)
            )
            for words, names in gain.baselines.items():
                time, name = min((milliseconds(line, gain, name), name) for name in names)
                ratio = speedup(pairs.get(key, {}), gain, name)
                error = f" +- {number(2 * ratio.error)}" if ratio else ""
                factor = f"{number(ratio or time / own)}x{error}"
                other = words.format(name=name)
                found.append((task, gain.model, device, other, number(time), number(own), factor))
    ends = ("baseline, ms", "jaxkv, ms", "speedup (of paired samples: +- two errors)")
    return table(("task", "model, dtype", "device", "baseline", *ends), found)
