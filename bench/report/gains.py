"""Rows of the README's table: jaxkv compared with a baseline, in tasks of a serving engine."""

from collections.abc import Sequence

from bench.collectives import tensor_parallel
from bench.harness.records import File, Row
from bench.metadata import build
from bench.report import plots
from bench.serving import demo
from bench.transfer import engines, overlap

# Task, model and dtype, device, baseline, and the milliseconds of baseline and jaxkv.
Gain = tuple[str, str, str, str, float, float]


def gains(files: Sequence[File]) -> list[Gain]:
    """All tasks in the records."""
    return [
        *_serving_gains(files),
        *_engine_gains(files),
        *_overlap_gains(files),
        *_metadata_gains(files),
        *_tensor_parallel_gains(files),
    ]


def later_turns(files: Sequence[File]) -> list[tuple[File, list[Row]]]:
    """Rows of the serving example, turns after the first."""
    found = [
        (file, [row for row in file.rows if row.case == demo.LATER_TURNS])
        for file in files
        if file.name == "demo"
    ]
    return [(file, rows) for file, rows in found if rows]


def fastest_engine_rows(files: Sequence[File]) -> dict[tuple[str, str], Row]:
    """Fastest implementation with device ids, by device and case."""
    best: dict[tuple[str, str], Row] = {}
    for file in (file for file in files if file.name == "engines"):
        for row in file.rows_of(engines.LATENCY):
            case, _, implementation = row.case.rpartition(", ")
            key = file.device, case
            if implementation != "dma":
                best[key] = min(best.get(key, row), row, key=lambda row: row.value)
    return best


def engine_time(row: Row, baseline: str) -> float:
    """Milliseconds of a baseline; stores reuse host memory, as in a pool."""
    return row.baselines.get(baseline + engines.REUSED, row.baselines[baseline])


def _serving_gains(files: Sequence[File]) -> list[Gain]:
    task, model = "time to first token, later turns", "Qwen3-0.6B shapes, float32"
    baseline = "recompute"
    return [
        (task, model, file.device, "recomputation", first.baselines[baseline], first.value)
        for file, (first, *_) in later_turns(files)
        if baseline in first.baselines
    ]


def _engine_gains(files: Sequence[File]) -> list[Gain]:
    baselines = {
        engines.TPU_INFERENCE: "one `device_put` per page (tpu-inference)",
        engines.ALL_PAGES: "one `device_put` of all pages, staged in HBM",
    }
    return [
        (case, "MLA, latent of 512, bfloat16", device, words, engine_time(row, baseline), row.value)
        for (device, case), row in fastest_engine_rows(files).items()
        if case.endswith("8 KiB")
        for baseline, words in baselines.items()
    ]


def _overlap_gains(files: Sequence[File]) -> list[Gain]:
    gains = []
    for file in (file for file in files if file.name == "overlap"):
        steps = [row for row in plots.overlap_steps(file.rows) if "memory" in row.case]
        overlapped = [
            row for row in steps if not row.case.endswith((overlap.NO_LOAD, overlap.SEQUENTIAL))
        ]
        if overlapped:
            best = min(overlapped, key=lambda row: row.value)
            task = f"{best.case.partition(':')[0]} loaded in it"
            baseline = best.baselines[overlap.SEQUENTIAL]
            model = "32 layers, bfloat16"
            gains.append((task, model, file.device, "load before the step", baseline, best.value))
    return gains


def _metadata_gains(files: Sequence[File]) -> list[Gain]:
    gains = []
    for file in (file for file in files if file.name == "metadata"):
        times = {row.case: row.value / 1e3 for row in file.rows_of(build.LATENCY)}
        in_step, baseline = (
            times.get(f"{build.STEP}, {method}") for method in (build.IN_STEP, build.ON_HOST)
        )
        if in_step and baseline:
            model = "16 matrices of 4096, bfloat16"
            gains.append(
                (build.STEP, model, file.device, "metadata on the host", baseline, in_step)
            )
    return gains


def _tensor_parallel_gains(files: Sequence[File]) -> list[Gain]:
    return [
        (
            f"decode step, {row.case.rpartition(', ')[2]}", "Qwen3-8B shapes, 12 layers, bfloat16",
            f"{row.case.partition(' ')[0]} x {file.device}", "`psum`",
            row.baselines[tensor_parallel.PSUM], row.value,
        )
        for file in files
        for row in (file.rows_of("time per step") if file.bench == "tensor_parallel" else ())
        if row.case.endswith("batch 16")
    ]  # fmt: skip
