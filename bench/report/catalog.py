"""The tables of the documentation by the names of their sections."""

from collections.abc import Callable, Sequence
from functools import partial

from bench.harness.records import File
from bench.report import plots, tables
from bench.report.gains import ALL_PAGES, ENGINES, LATENCY, REUSED, SGLANG, TPU_INFERENCE, gains
from bench.report.tables import Cell, Line, Table, baseline, best, over, slashed, value, values

ALL_REDUCE = r"(?P<n>\d+) devices, {}, (?P<b>\d+ \w+): (?P<m>{}) \((?P<ran>.*)\)"
TIMES = ("GPU time", "time per call (chained)", "time per pair (chained)")
SYMMETRIC = "psum, NCCL symmetric buffers"
STEP = "time per step"
MAIN_BYTES = r"(?:1|32|256) KiB|(?:1|4|64) MiB"


def all_reduce(files: Sequence[File]) -> str:
    """One row per number of devices and some sizes: the choices of the tuning table."""
    case = rf"(?P<n>\d+) devices, (?P<p>one[^:]*), (?P<b>{MAIN_BYTES}): (?P<m>chosen|psum) \(.*\)"
    cells: dict[str, Cell] = {"algorithm": lambda line: ran(line, "chosen")}
    for metric in TIMES:
        cells[metric] = slashed(
            *(value(metric, m) for m in ("chosen", "psum")), best(metric, "chosen")
        )
    cells["psum kernel"] = lambda line: ran(line, "psum")
    key = ("GPUs", "processes", "bytes")
    return Table("all_reduce", case, key, cells, (TIMES[0], "chosen"))(files)


def all_reduce_nccl(files: Sequence[File]) -> str:
    """One row per number of devices and size at which psum ran NCCL's symmetric kernels."""
    case = rf"(?P<n>\d+) devices, one process, (?P<b>[^:]*): (?P<m>chosen|{SYMMETRIC}) \(.*\)"
    cells = {m: slashed(value(m, "chosen"), value(m, SYMMETRIC)) for m in TIMES}
    cells["psum kernel"] = lambda line: ran(line, SYMMETRIC)
    table = Table("all_reduce", case, ("GPUs", "bytes"), cells, (TIMES[0], SYMMETRIC))
    return table(files)


def ran(line: Line, method: str) -> str:
    """The algorithm or the kernels of a method, from the end of its case."""
    cases = [row.case for (_, name), row in line.items() if name == method]
    return cases[0].rpartition(" (")[2].removesuffix(")") if cases else "-"


def engine_time(name: str) -> Cell:
    """Stores reuse host memory, as in a pool."""
    return baseline(LATENCY, name + REUSED, name, method="as chosen")


def offload_trace(files: Sequence[File]) -> str:
    """One row per capacity and eviction policy: share of blocks found and written."""

    def shares(method: str) -> Cell:
        def cell(line: Line) -> str:
            found = [line.get((metric, method)) for metric in ("hit rate", "blocks written")]
            return ", ".join(f"{row.value:.1f} %" if row else "-" for row in found)

        return cell

    cached = ", device cache of 1,000"
    methods = ("through", "second_use", f"back{cached}")
    case = r"(?P<c>[\d,]+) blocks (?P<p>\w+) (?P<m>.+)"
    cells = {f"{method}: hits, written": shares(method) for method in methods}
    return Table("offload_trace", case, ("host blocks", "policy"), cells)(files)


def sparse_decode(files: Sequence[File]) -> str:
    """One row per place of the rows and reuse; records have the names of classes."""
    cells = {"us per step": value("time per step"), "tokens/s": value("decode throughput")}
    case = r"(?P<t>\w+), (?P<n>\d+) requests of (?P<c>\d+), reuse (?P<r>\d+%)"
    found = Table("sparse_decode", case, ("KV rows", "requests", "context", "reuse"), cells)(files)
    return found.replace("InHbm", "in HBM").replace(
        "InHostMemory", "in host memory, hot buffer in HBM"
    )


TABLES: dict[str, Callable[[Sequence[File]], str]] = {
    "all_reduce": all_reduce,
    "all_reduce_nccl": all_reduce_nccl,
    "all_targets": tables.all_targets,
    "checks": tables.checks,
    "demo": tables.demo,
    "disagreements": tables.disagreements,
    "engines": Table(
        "engines",
        f"{ENGINES}, (?P<m>as chosen)",
        ("pages",),
        {
            "jaxkv, ms": value(LATENCY, "as chosen"),
            f"one device_put per page ({TPU_INFERENCE}), ms": engine_time(TPU_INFERENCE),
            f"one device_put per page ({SGLANG}), ms": engine_time(SGLANG),
            f"{ALL_PAGES}, ms": engine_time(ALL_PAGES),
        },
    ),
    "gains": gains,
    "metadata": Table(
        "metadata",
        r"(?P<case>.*, 256 rows, 8192 tokens|flex\.update, .*|decode step.*)",
        ("case",),
        {
            "kernels": value("kernels"),
            "GPU time, us": value("GPU time"),
            "latency (data available), us": value(LATENCY),
            "on the host, us": baseline(LATENCY),
        },
    ),
    "offload_trace": offload_trace,
    "overlap": Table(
        "overlap",
        "(?P<step>.*)",
        ("step",),
        {"ms": value(STEP), "x step without a load": over(STEP, "without a load")},
    ),
    "plots": plots.markdown,
    "records": tables.all_records,
    "serving": Table(
        "serving",
        r"(?P<w>(?!.* in flight)[^:]*)",
        ("workload, system",),
        {
            "requests/s": value("requests/s"),
            "TTFT p50 / p99, ms": values("TTFT p50", "TTFT p99"),
            "inter-token latency p50 / p99, ms": values(
                "inter-token latency p50", "inter-token latency p99"
            ),
            "prompt tokens in HBM / on the host, %": values(
                "prompt tokens in HBM", "prompt tokens on the host"
            ),
            "loaded / stored, GB": values("loaded", "stored"),
            "consecutive pages": value("consecutive pages"),
            "host time per step, ms": value("host time per step"),
            "GPU idle share, %": value("GPU idle share"),
            "steps dispatched to an idle device, %": value("steps dispatched to an idle device"),
        },
        ("requests/s", ""),
    ),
    "serving_in_flight": Table(
        "serving",
        r"multi_turn, (?P<n>\d) in flight, pages of 32, (?P<system>[^:]*)",
        ("requests in flight", "system"),
        {
            "requests/s": value("requests/s"),
            "TTFT p50 / p99, ms": values("TTFT p50", "TTFT p99"),
        },
        ("requests/s", ""),
    ),
    "serving_ttft": Table(
        "serving_ttft",
        "(?P<c>[^:]*)",
        ("case, system",),
        {
            "TTFT p50, ms": value("TTFT p50"),
            "inter-token latency of the running requests, p50 / p99, ms": values(
                "inter-token latency p50", "inter-token latency p99"
            ),
        },
    ),
    "sparse": Table(
        "sparse",
        r"(?P<bytes>\d+) B rows, batch (?P<b>32), context (?P<c>32768), reuse (?P<r>\d+%)",
        ("row, bytes", "requests", "context", "reuse"),
        {
            "jaxkv, us": value("time per call"),
            "published design, us": baseline("time per call", "published design"),
            "cudaMemcpyBatchAsync, us": baseline("time per call", "cudaMemcpyBatchAsync"),
            "missing rows, GB/s": value("missing rows"),
        },
    ),
    "sparse_decode": sparse_decode,
    "targets_count": tables.targets_count,
    "serving_missed": partial(tables.missed, bench="serving"),
    "tensor_parallel": Table(
        "tensor_parallel",
        "(?P<step>.*)",
        ("step",),
        {
            "jaxkv, ms": value(STEP),
            "psum, ms": baseline(STEP, "psum"),
            "no all-reduce, ms": baseline(STEP, "no all-reduce"),
            "x psum": over(STEP, "psum"),
        },
        (STEP, ""),
    ),
    "tests": tables.tests,
    "transfer": tables.transfer,
    "transfer_counts": partial(tables.transfer, main=False),
    "unmeasured": tables.unmeasured,
}
