"""Tables of engines, and the README's table of gains."""

from collections.abc import Sequence

from bench.harness.records import File, Row
from bench.harness.timing import Figure
from bench.report.tables import RATE, lines, number, table

ENGINES = r"(?P<pages>\w+, \d+ layers x \d+ pages of \d+ KiB), (?P<m>.+)"
LATENCY, REUSED = "latency (data available)", ", host memory reused"
PER_PAGE, ALL_PAGES = "one device_put per page", "one device_put of all pages"
TPU_INFERENCE, SGLANG = "tpu-inference", "sglang-jax"
DEVICE_PUT_PAGES = "one `device_put` per page"
STEP_TIME, SYNCHRONOUS = "inter-token latency p50", "metadata on the host, no step ahead"


def engine_rows(files: Sequence[File]) -> dict[tuple[str, ...], Row]:
    """Rows with device ids, as the baselines have: as chosen, in older records the fastest."""
    found = {}
    for key, line in lines(files, "engines", ENGINES).items():
        rows = {m: row for (metric, m), row in line.items() if metric == LATENCY}
        with_ids = [row for m, row in rows.items() if m != "dma" and not m.endswith("HostIds")]
        found[key] = rows.get("as chosen") or min(with_ids, key=lambda row: row.value)
    return found


def engine_time(row: Row, name: str) -> float:
    """Milliseconds of a baseline; stores reuse host memory, as in a pool."""
    return row.baselines.get(name + REUSED, row.baselines[name])


def engines(files: Sequence[File]) -> str:
    names = (TPU_INFERENCE, SGLANG, ALL_PAGES)
    headings = (f"{PER_PAGE} ({TPU_INFERENCE})", f"{PER_PAGE} ({SGLANG})", ALL_PAGES)
    rows = [
        (*key, number(row.value), *(number(engine_time(row, name)) for name in names))
        for key, row in engine_rows(files).items()
    ]
    return table(("device", "pages", *(f"{name}, ms" for name in ("jaxkv", *headings))), rows)


def ratios(files: Sequence[File], bench: str, case: str) -> dict[tuple[str, ...], Figure]:
    """Rows that have an error, by device, groups of the pattern and method."""
    return {
        (*key, m): Figure(row.value, row.error)
        for key, line in lines(files, bench, case).items()
        for (_, m), row in line.items()
        if row.error
    }


def gains(files: Sequence[File]) -> str:
    """One row per task of an engine and baseline: the README's table."""
    found = []

    def add(
        task: str,
        model: str,
        device: str,
        other: str,
        times: tuple[float, float],
        speedup: Figure | None = None,
    ) -> None:
        """`speedup`: by the ratios of rounds, if the record has it."""
        ms, gain = map(number, times), f"{number(speedup or times[0] / times[1])}x"
        error = f" +- {number(2 * speedup.error)}" if speedup else ""
        found.append((task, model, device, other, *ms, gain + error))

    model, first = "Qwen3-8B shapes, bfloat16", "TTFT p50"
    case = r"qwen3-8b, (?P<c>\d+ tokens cached, \d+ new)"
    of_first = ratios(files, "serving_ttft", rf"{case}: {first}, (?P<m>.+)")
    for (device, tokens), line in lines(files, "serving_ttft", rf"{case}, (?P<m>.+)").items():
        times = line[first, "recompute"].value, line[first, "jaxkv"].value
        ratio = of_first.get((device, tokens, "jaxkv / recompute"))
        gain = 1 / ratio if ratio else None
        add(f"time to first token, {tokens}", model, device, "recomputation", times, gain)
    case = "(?P<w>multi_turn), pages of 32"
    of_rates = ratios(files, "serving", rf"{case}: {RATE}, (?P<m>.+)")
    task = "multi-turn prompts, time per request at saturation"
    for (device, workload), line in lines(files, "serving", rf"{case}, (?P<m>.+)").items():
        ms = {method: 1e3 / row.value for (name, method), row in line.items() if name == RATE}
        for other, words in (("recompute", "recomputation"), ("device_put", DEVICE_PUT_PAGES)):
            gain = of_rates.get((device, workload, f"jaxkv / {other}"))
            add(task, model, device, words, (ms[other], ms["jaxkv"]), gain)
    for (device, case), row in engine_rows(files).items():
        faster = min((TPU_INFERENCE, SGLANG), key=lambda name: engine_time(row, name))
        for name, words in (
            (faster, f"{DEVICE_PUT_PAGES} ({faster})"),
            (ALL_PAGES, "one `device_put` of all pages, staged in HBM"),
        ):
            times = engine_time(row, name), row.value
            add(case, "MLA, latent of 512, bfloat16", device, words, times)
    for (device, step), line in lines(files, "overlap", "(?P<s>.*-bound.*): (?P<m>.+)").items():
        rows = {m: row for (_, m), row in line.items() if row.unit == "ms"}
        loads = [row for m, row in rows.items() if m not in ("sequential", "without a load")]
        row = rows.get("as chosen") or min(loads, key=lambda row: row.value)
        times = row.baselines["sequential"], row.value
        add(f"{step} loaded in it", "32 layers, bfloat16", device, "load before the step", times)
    case = r"scenario, qwen3-0.6b, (?P<m>.+)"
    for (device,), line in lines(files, "serving_decode", case).items():
        ms = {way: row.value for (metric, way), row in line.items() if metric == STEP_TIME}
        times = ms["host metadata"], ms["in HBM"]
        add("decode step of 32 requests", "Qwen3-0.6B shapes, bfloat16", device, SYNCHRONOUS, times)
    case = r"(?P<n>\d+) devices, .*(?P<b>batch 16)"
    for (device, world, batch), line in lines(files, "tensor_parallel", case).items():
        row = line["time per step", ""]
        times = row.baselines["psum"], row.value
        model = "Qwen3-8B shapes, 12 layers, bfloat16"
        add(f"decode step, {batch}", model, f"{world} x {device}", "`psum`", times)
    ends = ("baseline, ms", "jaxkv, ms", "speedup (of paired samples: +- two errors)")
    return table(("task", "model, dtype", "device", "baseline", *ends), found)
