"""Tables of the documentation, each generated from result files."""

from collections.abc import Callable, Sequence

from bench.collectives import all_reduce, tensor_parallel
from bench.harness import older
from bench.harness.records import HOST, File, Row, Target
from bench.metadata import build
from bench.offload import trace
from bench.report import plots as report_plots
from bench.report import staleness
from bench.report.gains import engine_time, fastest_engine_rows, gains, later_turns
from bench.serving import demo
from bench.transfer import bandwidth_rows, engines, overlap

NOT_MEASURED = "Not measured yet.\n"
CHOSEN_SHARE = "chosen / fastest"
SEVERAL_GPUS = ("all_reduce", "multigpu_test", "tensor_parallel")
ALL_REDUCE_METRICS = (all_reduce.GPU_TIME, all_reduce.CHAINED_CALL, all_reduce.CHAINED_PAIR)


def number(value: float) -> str:
    """Three significant digits without an exponent; integers in full."""
    if float(value).is_integer():
        return f"{int(value):,}"
    digits = max(0, 3 - len(str(int(abs(value))))) if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return NOT_MEASURED
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def verdict(target: Target) -> str:
    if target.met is False and target.above_peak:
        return "**missed**, above peak"
    return {True: "met", False: "**missed**", None: "not measured"}[target.met]


def at_peak(target: Target) -> str:
    return "-" if target.bound is None else f"{number(target.bound)} {target.unit}"


def figures(target: Target) -> tuple[str, str]:
    want = number(target.want)
    got = "-" if target.got is None else number(target.got)
    if got == want and not target.met:  # a near miss
        got = f"{target.got:,.4f}"
    return f"{target.op} {want} {target.unit}", f"{got} {target.unit}" if got != "-" else got


def all_targets_table(files: Sequence[File]) -> str:
    """Every target; "+-" is followed by two standard errors."""
    header = (
        "device", "benchmark", "quantity", "target", "measured", "+-", "at peak", "result",
    )  # fmt: skip
    lines = [
        (f.device, f.name, t.name, *figures(t), two_errors(t), at_peak(t), verdict(t))
        for f in files
        for t in f.targets
    ]
    return table(header, lines)


def two_errors(target: Target) -> str:
    return "-" if target.error is None else number(2 * target.error)


def checks_table(files: Sequence[File]) -> str:
    header = ("device", "benchmark", "condition", "required", "found", "result")
    words = {True: "holds", False: "**fails**", None: "not measured"}
    lines = [
        (f.device, f.name, check.name, *figures(check), words[check.met])
        for f in files
        for check in f.checks
    ]
    return table(header, lines)


def records_table(files: Sequence[File]) -> str:
    """One row per file: number of targets met, missed and not measured; checks that hold."""
    lines = []
    listed = staleness.pending()
    for file in files:
        verdicts = [target.met for target in file.targets]
        counts = [number(verdicts.count(met)) for met in (True, False, None)]
        hold = f"{sum(bool(check.met) for check in file.checks)} of {len(file.checks)}"
        why = listed.get(f"{file.device}/{file.name}", "-")
        about = (file.device, file.name, *counts, hold, file.revision, file.date, why)
        lines.append(about)
    header = (
        "device", "benchmark", "met", "missed", "not measured", "checks", "commit", "date",
        "pending: why it was not measured again",
    )  # fmt: skip
    return table(header, lines)


def retired_table(files: Sequence[File]) -> str:
    """Targets that no benchmark records any more; independent of the records."""
    return "".join(f"- {reason}.\n" for reason in older.RETIRED.values())


def unmeasured(files: Sequence[File]) -> str:
    """Missing records of the multi-GPU benchmarks, by device."""
    lines = []
    for device in dict.fromkeys(file.device for file in files if file.device != HOST):
        measured = {file.name for file in files if file.device == device}
        wanted = [f"{bench}_{n}" for bench in SEVERAL_GPUS for n in all_reduce.WORLDS]
        if missing := [name for name in wanted if name not in measured]:
            lines.append(f"Not measured on {device}: {', '.join(missing)}.\n")
    return "".join(lines) or NOT_MEASURED


def targets_count(files: Sequence[File]) -> str:
    """Number of targets met, over all records."""
    met = [target.met for file in files for target in file.targets]
    if not met:
        return NOT_MEASURED
    hold = [check.met for file in files for check in file.checks]
    return (
        f"Of {len(met)} targets of performance {met.count(True)} are met, {met.count(False)} "
        f"missed; of {len(hold)} checks of correctness {hold.count(True)} hold.\n"
    )


def tests_table(files: Sequence[File]) -> str:
    outcomes = ("passed", "failed", "skipped")
    lines = []
    for file in files:
        if file.bench not in ("gpu_test", "multigpu_test"):
            continue
        counted = [
            sum(row.value for row in file.rows_of(outcome) if row.case.endswith(".py"))
            for outcome in outcomes
        ]
        lines.append((file.device, file.name, *map(number, counted), file.revision, file.date))
    return table(("device", "run", *outcomes, "commit", "date"), lines)


def transfer_table(files: Sequence[File]) -> str:
    """One row per direction and block size, with about the same number of blocks in each."""
    return _transfer_table(files, bandwidth_rows.main_points)


def transfer_counts_table(files: Sequence[File]) -> str:
    """The same for other numbers of blocks."""
    return _transfer_table(files, bandwidth_rows.other_points)


def _transfer_table(
    files: Sequence[File], select: Callable[[Sequence[Row]], dict[bandwidth_rows.Point, Row]]
) -> str:
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for file in (file for file in files if file.name == "transfer"):
        shares = {row.case: f"{row.value:.0%}" for row in file.rows_of(bandwidth_rows.CHOSEN)}
        for point, row in select(file.rows).items():
            assert row.peak
            line = lines.setdefault((file.device, point.cell), {})
            share = f"{row.value / row.peak['value']:.0%}"
            # The first is the implementation with its default number of SMs.
            line.setdefault(point.name, f"{number(row.value)} ({share}; {point.num_sms})")
            line |= {name: number(value) for name, value in row.baselines.items()}
            line["peak"] = number(row.peak["value"])
            if point.cell in shares:
                line[CHOSEN_SHARE] = shares[point.cell]
    names = list(dict.fromkeys(name for line in lines.values() for name in line))
    ends = {CHOSEN_SHARE: 2, "peak": 3}
    names.sort(key=lambda name: ends.get(name, name not in bandwidth_rows.NAMES))
    return table(
        ("device", "blocks, GB/s (share of peak; SMs)", *names),
        [(*key, *(line.get(name, "-") for name in names)) for key, line in lines.items()],
    )


def plots(files: Sequence[File]) -> str:
    """Markdown for the plots that `draw` makes of the files."""
    images = [
        f"![{bench} on {device}](plots/{plot_name(bench, device)})\n"
        for bench, device in drawn_rows(files)
    ]
    return "\n".join(images) or NOT_MEASURED


def drawn_rows(files: Sequence[File]) -> dict[tuple[str, str], list[Row]]:
    """The rows of each plot, by benchmark and device."""
    rows: dict[tuple[str, str], list[Row]] = {}
    for file in files:
        if file.bench in report_plots.FIGURES:
            rows.setdefault((file.bench, file.device), []).extend(file.rows)
    return {
        key: found for key, found in rows.items() if report_plots.FIGURES[key[0]].is_drawn(found)
    }


def plot_name(bench: str, device: str) -> str:
    return f"{bench}_{device}.svg"


def overlap_table(files: Sequence[File]) -> str:
    """One row per method of loading during a step."""
    lines = [
        (
            file.device,
            row.case,
            number(row.value),
            number(row.value / row.baselines[overlap.NO_LOAD]),
        )
        for file in files
        for row in (report_plots.overlap_steps(file.rows) if file.name == "overlap" else ())
    ]
    return table(("device", "step", "ms", overlap.RATIO_UNIT), lines)


def metadata_table(files: Sequence[File]) -> str:
    """One row per builder, at one batch size, and one per kind of step."""
    lines = []
    for file in (file for file in files if file.name == "metadata"):
        cases: dict[str, dict[str, Row]] = {}
        for row in file.rows:
            if build.is_main(row.case):
                cases.setdefault(row.case, {})[row.metric] = row
        for case, rows in cases.items():
            latency = rows[build.LATENCY]
            host = latency.baselines.get(build.HOST_BASELINE)
            gpu = [rows.get(metric) for metric in (build.KERNELS, build.GPU_TIME)]
            cells = [number(row.value) if row else "-" for row in (*gpu, latency)]
            lines.append((file.device, case, *cells, number(host) if host else "-"))
    header = ("device", "case", "kernels", "GPU time, us", f"{build.LATENCY}, us")
    return table((*header, f"{build.HOST_BASELINE}, us"), lines)


def all_reduce_table(files: Sequence[File]) -> str:
    """One row per number of devices and some sizes: the choices of the tuning table."""
    lines = []
    for file in (file for file in files if file.bench == "all_reduce"):
        found = all_reduce.rows_by_case(file.rows)
        psums = {case[:3]: case for case in found if case.method == all_reduce.PSUM}
        for case, rows in found.items():
            if case.method != all_reduce.CHOSEN or case.num_bytes not in all_reduce.MAIN_SIZES:
                continue
            psum = psums.get(case[:3])
            cells = [
                _times(rows.get(m), found[psum].get(m) if psum else None)
                for m in ALL_REDUCE_METRICS
            ]
            size = all_reduce.size_text(case.num_bytes)
            head = (file.device, str(case.world), case.setting, size, case.ran)
            lines.append((*head, *cells, psum.ran if psum else "-"))
    header = (
        "device",
        "GPUs",
        "processes",
        "bytes",
        "algorithm",
        *ALL_REDUCE_METRICS,
        "psum kernel",
    )
    return table(header, lines)


def all_reduce_nccl_table(files: Sequence[File]) -> str:
    """One row per number of devices and size at which psum ran NCCL's symmetric kernels."""
    lines = []
    for file in (file for file in files if file.bench == "all_reduce"):
        found = all_reduce.rows_by_case(file.rows)
        chosen = {
            case[:3]: rows for case, rows in found.items() if case.method == all_reduce.CHOSEN
        }
        for case, rows in found.items():
            if case.method == all_reduce.SYMMETRIC and case[:3] in chosen:
                pairs = [(chosen[case[:3]].get(m), rows.get(m)) for m in ALL_REDUCE_METRICS]
                cells = [
                    " / ".join(number(row.value) if row else "-" for row in both) for both in pairs
                ]
                size = all_reduce.size_text(case.num_bytes)
                lines.append((file.device, str(case.world), size, *cells, case.ran))
    return table(("device", "GPUs", "bytes", *ALL_REDUCE_METRICS, "psum kernel"), lines)


def _times(chosen: Row | None, psum: Row | None) -> str:
    """Times of jaxkv, psum and the best baseline."""
    best = min(chosen.baselines.values(), default=None) if chosen else None
    times = (*(row.value if row else None for row in (chosen, psum)), best)
    return " / ".join("-" if time is None else number(time) for time in times)


def tensor_parallel_table(files: Sequence[File]) -> str:
    """One row per number of devices and batch size."""
    lines = [
        (
            file.device, row.case, number(row.value), *map(number, row.baselines.values()),
            number(row.value / row.baselines[tensor_parallel.PSUM]),
        )
        for file in files
        for row in (file.rows_of("time per step") if file.bench == "tensor_parallel" else ())
    ]  # fmt: skip
    others = (tensor_parallel.PSUM, tensor_parallel.NO_ALL_REDUCE)
    header = ("device", "step", "jaxkv, ms", *(f"{name}, ms" for name in others), "x psum")
    return table(header, lines)


def engines_table(files: Sequence[File]) -> str:
    """One row per case: the fastest jaxkv implementation with device ids, as in the baselines.

    The baselines' stores reuse host memory, as in a pool.
    """
    baselines = (engines.TPU_INFERENCE, engines.SGLANG, engines.ALL_PAGES)
    lines = [
        (*key, number(row.value), *(number(engine_time(row, baseline)) for baseline in baselines))
        for key, row in fastest_engine_rows(files).items()
    ]
    per_page = [f"{engines.PER_PAGE} ({engine})" for engine in baselines[:2]]
    headings = ("jaxkv", *per_page, engines.ALL_PAGES)
    return table(("device", "pages", *(f"{heading}, ms" for heading in headings)), lines)


def gains_table(files: Sequence[File]) -> str:
    """One row per task of an engine and baseline: the README's table."""
    header = ("task", "model, dtype", "device", "baseline", "baseline, ms", "jaxkv, ms", "speedup")
    lines = [
        (*words, number(baseline), number(time), f"{number(baseline / time)}x")
        for *words, baseline, time in gains(files)
    ]
    return table(header, lines)


def demo_table(files: Sequence[File]) -> str:
    """One row per device: the turns after the first, whose prompts have a history."""
    header: list[str] = []
    lines = []
    for file, rows in later_turns(files):
        unequal = [check.got or 0 for check in file.checks if check.unit == demo.UNEQUAL]
        header = ["device", *map(_demo_heading, rows), demo.UNEQUAL]
        cells = [" / ".join(map(number, (row.value, *row.baselines.values()))) for row in rows]
        lines.append([file.device, *cells, " / ".join(map(number, unequal))])
    return table(header, lines)


def _demo_heading(row: Row) -> str:
    runs = f" ({' / '.join((demo.RUN, *row.baselines))})" if row.baselines else ""
    return f"{row.metric}, {row.unit}{runs}"


def offload_trace_table(files: Sequence[File]) -> str:
    """One row per capacity and eviction policy: share of blocks found and written."""
    kinds = (*((w, "") for w in trace.WRITES), ("back", trace.device_cache_text()))
    lines = []
    for file in (file for file in files if file.name == "offload_trace"):
        shares = {(row.case, row.metric): f"{row.value:.1f} %" for row in file.rows}
        for capacity in trace.CAPACITIES:
            for policy in trace.POLICIES:
                cases = [f"{capacity:,} blocks {policy} {write}{cache}" for write, cache in kinds]
                cells = [f"{shares[c, 'hit rate']}, {shares[c, 'blocks written']}" for c in cases]
                lines.append((f"{capacity:,}", policy.upper(), *cells))
    headings = [f"{write}{cache}: hits, written" for write, cache in kinds]
    return table(("host blocks", "policy", *headings), lines)


def serving_table(files: Sequence[File]) -> str:
    """One row per workload and system of `bench.serving.compare`."""
    metrics = {
        "requests/s": ("requests/s",),
        "TTFT p50 / p99, ms": ("TTFT p50", "TTFT p99"),
        "inter-token latency p50 / p99, ms": ("inter-token latency p50", "inter-token latency p99"),
        "prompt tokens in HBM / on the host, %": (
            "prompt tokens in HBM", "prompt tokens on the host",
        ),
        "loaded / stored, GB": ("loaded", "stored"),
        "host time per step, ms": ("host time per step",),
        "steps dispatched to an idle device, %": ("steps dispatched to an idle device",),
    }  # fmt: skip
    return _figures_table(files, "serving", "workload, system", metrics)


def serving_ttft_table(files: Sequence[File]) -> str:
    """One row per case and system of `bench.serving.ttft`."""
    metrics = {
        "TTFT p50, ms": ("TTFT p50",),
        "inter-token latency of the running requests, p50 / p99, ms": (
            "p50 inter-token latency beside loads", "p99 inter-token latency beside loads",
        ),
    }  # fmt: skip
    return _figures_table(files, "serving_ttft", "case, system", metrics)


def _figures_table(
    files: Sequence[File], name: str, cases: str, metrics: dict[str, tuple[str, ...]]
) -> str:
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for file in (file for file in files if file.name == name):
        for row in file.rows:
            if any(row.metric in names for names in metrics.values()):
                lines.setdefault((file.device, row.case), {})[row.metric] = number(row.value)
    cells = [
        (*key, *(" / ".join(found.get(m, "-") for m in names) for names in metrics.values()))
        for key, found in lines.items()
    ]
    return table(("device", cases, *metrics), cells)


TABLES: dict[str, Callable[[Sequence[File]], str]] = {
    "all_reduce": all_reduce_table,
    "all_reduce_nccl": all_reduce_nccl_table,
    "all_targets": all_targets_table,
    "checks": checks_table,
    "demo": demo_table,
    "engines": engines_table,
    "gains": gains_table,
    "metadata": metadata_table,
    "offload_trace": offload_trace_table,
    "overlap": overlap_table,
    "plots": plots,
    "serving": serving_table,
    "serving_ttft": serving_ttft_table,
    "records": records_table,
    "retired": retired_table,
    "targets_count": targets_count,
    "tensor_parallel": tensor_parallel_table,
    "tests": tests_table,
    "transfer": transfer_table,
    "transfer_counts": transfer_counts_table,
    "unmeasured": unmeasured,
}
