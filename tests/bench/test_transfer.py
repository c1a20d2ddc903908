"""The benchmarks of block copies: verification, choices, and targets from samples."""

from unittest import mock

import jax
import numpy as np
import pytest

import jaxkv
from bench import profile_copy, transfer
from bench.harness import blocks, copy_baselines, processes, timing
from bench.harness.blocks import DEVICE_IDS, HOST_IDS, KIB, Blocks, Method
from bench.harness.copy_baselines import BATCH, SHORT_BATCH
from bench.harness.records import Results
from bench.harness.timing import Samples
from jaxkv._src.autotune.pools import Pools
from jaxkv._src.transfer import api, dispatch

pytestmark = pytest.mark.end_to_end

NAME = {"cpu": "host", "gpu": "kernel"}[jax.default_backend()]


@pytest.fixture(scope="module")
def pools():
    return Pools(1 << 16)


@pytest.mark.parametrize("direction", blocks.DIRECTIONS)
def test_program_with_stamps_copies_and_is_timed(pools, direction):
    made = Blocks(pools, KIB)
    timed = made.program(Method(NAME), direction, 8, copies=2).measure()
    assert 0 < timed.handlers < timed.done
    assert 0 < timed.returns <= timed.done
    assert (timed.gpu > 0) == (NAME == "kernel")


@pytest.mark.parametrize("direction", blocks.DIRECTIONS)
def test_program_with_wrong_bytes_raises_before_timing(monkeypatch, pools, direction):
    monkeypatch.setattr(blocks, "_copy", lambda name, src, dst, *ids, pinned: dst)
    with pytest.raises(AssertionError, match="blocks are wrong"):
        Blocks(pools, KIB).program(Method(NAME), direction, 8, copies=1)


def test_length_of_a_chain_is_from_calls_after_the_first_two(monkeypatch, pools):
    program = Blocks(pools, KIB).program(Method(NAME), "load", 8, copies=1)
    seconds = iter([9.0, 9.0, 1e-3, 1e-3, 1e-3])

    def idle_calls(repeats):
        done = timing.median([next(seconds) for _ in range(repeats)])
        return timing.Call(done, done)

    monkeypatch.setattr(program, "idle_calls", idle_calls)
    program.warm_up(0.04)
    assert program.calls == 40


def test_blocks_consumed_by_a_failed_program_are_recreated(pools):
    made = Blocks(pools, KIB)
    made.arrays.clear()
    made.fill()
    made.program(Method(NAME), "load", 8, copies=1)


@pytest.mark.parametrize("method", [Method(NAME, num_sms=3), Method(NAME, HOST_IDS)])
def test_program_uses_the_implementation_and_sms_of_its_method(pools, method, monkeypatch):
    taken = []

    def select_implementation(*args, **kwargs):
        taken.append(dispatch.select_implementation(*args, **kwargs))
        return taken[-1]

    monkeypatch.setattr(api, "select_implementation", select_implementation)
    program = Blocks(pools, KIB).program(method, "load", 8, copies=2)
    assert {one.implementation for one in taken[1:]} == {NAME}
    # The host has no SMs: the requested number has no effect and is not reported.
    assert program.num_sms == (0 if NAME == "host" else method.num_sms or taken[0].num_sms)


def test_baseline_method_uses_no_sms_and_forces_no_implementation():
    with Method(BATCH).taken(Method(BATCH).sms_for(jaxkv.swap_blocks)):
        assert dispatch._forced_implementation.get() is None


@pytest.mark.gpu
@pytest.mark.parametrize("baseline", copy_baselines.CODES)
@pytest.mark.parametrize("direction", blocks.DIRECTIONS)
def test_copy_baselines_inside_and_outside_jax_copy_all_blocks(pools, baseline, direction):
    made = Blocks(pools, KIB)
    made.program(Method(baseline), direction, 32, copies=2)  # verifies
    source, destination = made.sides(direction)
    id_sets = [made.ids(Method(baseline), 32, seed)[1] for seed in (5, 6)]
    copy = copy_baselines.Outside(baseline, source, destination, id_sets)
    for from_, to in id_sets:
        total, submit = copy(1)
        assert 0 < submit <= total
        np.testing.assert_array_equal(written(destination, to), written(source, from_))


def written(array, rows):
    """Rows of an array that JAX does not know to be written: it caches NumPy's copy of HBM."""
    if array.sharding.memory_kind == "pinned_host":
        return np.asarray(array)[rows]
    return np.asarray(array[rows])


def cell_with(samples, chosen, count=10_000, size=16 * KIB, direction="load"):
    """A cell with {method or baseline: seconds of a copy by round}."""
    cell = transfer.Cell(mock.Mock(block_bytes=size), direction, count)
    cell.samples, cell.choices, cell.batches = Samples(samples), chosen, [BATCH, SHORT_BATCH]
    return cell


def targets_of(cell, triton=None, many=True):
    grid = transfer.FULL
    bench = transfer.Bench(Results("transfer"), grid, {})
    bench.targets(cell, many=many, triton=triton)
    bench.judge(dict.fromkeys(blocks.DIRECTIONS, 50.0))
    return bench, {target.name.partition(": ")[2]: target for target in bench.results.targets}


KERNEL, ON_HOST, DMA = Method("kernel"), Method("kernel", HOST_IDS), Method("dma", HOST_IDS)


def test_targets_are_of_the_slower_choice_over_the_faster_batch_call():
    samples = {
        KERNEL: [4e-3, 4e-3, 4e-3],
        ON_HOST: [5e-3, 6e-3, 5e-3],
        DMA: [1e-3] * 3,  # not chosen
        BATCH: [20e-3] * 3,
        SHORT_BATCH: [10e-3, 12e-3, 10e-3],
    }
    bench, found = targets_of(cell_with(samples, [KERNEL, ON_HOST]))
    speedup = found["speedup over the faster batch call"]
    assert (speedup.got, speedup.error, speedup.met) == (2.0, 0.0, True)
    rate = 16 * KIB * 10_000 / 1e9
    assert speedup.bound == pytest.approx(50.0 / (rate / 10e-3))
    peak = found["as chosen"]
    assert peak.got == pytest.approx(rate / 5e-3 / 50)
    assert bench.ratios[transfer.OVER_BATCH["load"]] == {"load, 16 KiB x 10000": 2.0}


@pytest.mark.parametrize(
    ("figures", "cell", "lowest", "error"),
    [
        ([(1.0, 0.01), (1.1, 0.2)], "1", 1.0, 0.15),
        ([(0.9, 0.0), (1.0, 0.01), (1.1, 0.2)], "2", 0.9, 0.1),
        ([(0.9, 0.0), (1.0, 0.01)], "0", 0.9, 0.0),
        ([(1.0, 0.01), (0.9, 0.6)], "1", 0.9, 0.45),  # to 0, as no speedup is negative
    ],
)
def test_lowest_speedup_reaches_to_the_lowest_end_of_all(figures, cell, lowest, error):
    by_cell = {str(i): timing.Figure(*figure) for i, figure in enumerate(figures)}
    name, found = transfer.lowest_of(by_cell)
    assert name == cell and (found, found.error) == pytest.approx((lowest, error))


def test_error_of_a_lowest_speedup_is_that_of_its_lower_end():
    ratios = [0.95, 0.96, 0.97, 0.98, 1.0, 4.0, 5.0, 6.0, 7.0]
    found = transfer.at_least(ratios)
    assert (found, found - 2 * found.error) == pytest.approx((1.0, 0.96))
    assert timing.median(ratios).error == pytest.approx(2.5)


def test_target_of_the_lowest_speedup_has_a_row_that_names_its_cell():
    bench = transfer.Bench(Results("transfer"), transfer.FULL, {})
    cells = {"1 KiB": timing.Figure(0.9, 0.0), "4 KiB": timing.Figure(1.0, 0.2)}
    bench.ratios[transfer.LOWEST_TRITON] = cells
    bench.judge({})
    (row,) = bench.results.rows
    assert row.case.endswith("lowest end in 4 KiB") and (row.value, row.error) == (1.0, 0.2)
    assert [target.got for target in bench.results.targets] == [None, None, 0.9]


def test_baseline_of_few_blocks_is_called_in_jax():
    samples = {
        KERNEL: [4e-6] * 3, BATCH: [1e-6] * 3, Method(BATCH): [8e-6] * 3, ON_HOST: [2e-6] * 3,
    }  # fmt: skip
    bench, _ = targets_of(cell_with(samples, [KERNEL, ON_HOST], count=64), many=False)
    assert bench.ratios[transfer.OVER_BATCH["load"]] == {"load, 16 KiB x 64": 2.0}
    assert {target.got for target in bench.results.targets} == {2.0, None}


def test_triton_is_compared_on_equal_sms():
    samples = {KERNEL: [1e-3] * 3, transfer.SAME_SMS: [4e-3] * 3}
    bench, found = targets_of(cell_with(samples, [KERNEL], size=8 * KIB), triton=[6e-3] * 3)
    assert found["speedup over Triton, 12 SMs each"].got == pytest.approx(1.5)
    assert [float(one) for one in bench.ratios[transfer.LOWEST_TRITON].values()] == [
        pytest.approx(1.5)
    ]


def test_small_batches_compare_each_choice_with_the_better_baseline(monkeypatch, pools):
    rounds = {
        Method(BATCH): 4.0, Method(copy_baselines.LOOP): 2.0, KERNEL: 1.0, DMA: 3.0,
    }  # fmt: skip
    metrics = (transfer.IN_STEP, transfer.ONE_CALL, transfer.HOST_TIME)
    samples = {method: [dict.fromkeys(metrics, us)] * 3 for method, us in rounds.items()}
    monkeypatch.setattr(transfer, "samples_of", lambda *_: samples)
    made = Blocks(pools, 8 * KIB)
    monkeypatch.setattr(made, "chosen", lambda *args: {DEVICE_IDS: KERNEL, HOST_IDS: DMA}[args[2]])
    found = Results("small_batches")
    transfer.record_few(found, made, "load", 4, transfer.Effort(1, 1, 1))
    assert [(t.got, t.met) for t in found.targets] == [(0.5, True), (1.5, False)] * 2


def test_grid_counts_above_max_bytes_are_reduced():
    grid = transfer.Grid((KIB, 4 * KIB, 8 * KIB), 100, {8 * KIB: (1,)}, 1 << 20, 1 << 20)
    assert grid.counts_of(KIB) == [100] and grid.counts_of(8 * KIB) == [1, 100]
    assert grid.counts_of(64 * KIB) == [16]
    assert 50_000 in transfer.FULL.counts_of(24 * KIB)
    assert 4096 in transfer.FULL.counts_of(KIB)


def test_triton_answer_has_samples_by_direction(monkeypatch):
    answer = {"direction": "load", "bytes": 1024, "seconds": [1.0, 2.0]}
    ran = processes.ProcessResult([[answer]], "exit code 1")  # what was printed before counts
    monkeypatch.setattr(processes, "run", lambda *_, **__: ran)
    assert copy_baselines.triton(blocks=[1024]) == {("load", 1024): [1.0, 2.0]}


PROFILED = [
    '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"',
    '"0","void copy_blocks<8, uint4>(Params)","gpu__time_duration.sum","ns","204,800"',
    '"0","k","lts__t_requests_aperture_sysmem.sum","request","1"',
    '"0","k","pcie__read_bytes.sum","byte","11,534,336"',
    '"0","k","pcie__write_bytes.sum","byte","1,048,576"',
    '"0","k","smsp__issue_active.avg.pct_of_peak_sustained_active","%","6.5"',
    '"0","k","smsp__warp_issue_stalled_long_scoreboard_per_warp_active.pct","%","92.5"',
]


def test_profile_from_tool_output_has_all_metrics_or_raises(monkeypatch):
    printed = ["==PROF== Connected", "load, 10 us", *PROFILED]
    found = Results("profile")
    peak = profile_copy.peak_bandwidth
    monkeypatch.setattr(peak, "contiguous_copy", lambda *_: ("one copy", 55.0))
    case = profile_copy.Case("load", KIB, 12)
    profile_copy.record(found, case, profile_copy.parse("\n".join(printed)))
    values = {row.metric: row.value for row in found.rows}
    assert values["kernel bandwidth"] == pytest.approx(10_000 * KIB / 204_800)
    assert values["kernel time"] == pytest.approx(204.8)
    assert values["bytes read (link)"] == 11
    assert values["warps stalled on memory"] == 92.5
    for lost in (printed[:3], printed[:2], ["==ERROR=="]):
        with pytest.raises(ValueError, match="printed no"):
            profile_copy.parse("\n".join(lost))
