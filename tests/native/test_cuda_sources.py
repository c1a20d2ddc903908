"""Properties of the CUDA sources that no test on a machine without GPUs can observe at run time."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(not (ROOT / "cuda").exists(), reason="needs a checkout"),
]

# Handlers that XLA may record in a CUDA graph: they allocate nothing, do not synchronize, and pass
# no value to the device that the host computes for one execution.
CAPTURED = {
    "AlignStatesKernel",
    "AllReduceKernel",
    "CheckBoundsKernel",
    "CopyBlocksKernel",
    "CopyGroupsKernel",
    "CopyPairsKernel",
    "FlashInferKernel",
    "PlanPairsKernel",
    "SparseAppendKernel",
    "SparseWriteAddedKernel",
    "SparseFetchKernel",
    "WaitCopyKernel",
}
# They allocate nothing and load no module when they are called for the first time.
WITHOUT_INITIALIZATION = {"CopyBlocksDma"}


def sources(*suffixes: str) -> dict[str, str]:
    """The text of the product's CUDA sources, without comments."""
    paths = (path for path in (ROOT / "cuda").rglob("*") if path.suffix in suffixes)
    return {
        str(path.relative_to(ROOT)): re.sub(r"//[^\n]*", "", path.read_text())
        for path in paths
        if "testing" not in path.parts
    }


def test_every_launch_is_on_the_stream_of_its_call():
    found = 0
    for name, text in sources(".cu", ".cuh").items():
        configurations = re.findall(r"<<<(.*?)>>>", text, re.DOTALL)
        configurations += re.findall(r"cudaLaunchKernel\((.*?)\)\);", text, re.DOTALL)
        for configuration in configurations:
            found += 1
            assert re.search(r", (stream|stream_)$", configuration.strip()), (name, configuration)
    assert found >= 8


def test_ordered_accesses_have_system_scope():
    """The host and other GPUs take part: `.gpu` and `.cta` would not order anything for them."""
    found = 0
    for name, text in sources(".cu", ".cuh", ".h").items():
        for instruction in re.findall(r'"(?:ld|st|atom|red|fence)\.[a-z.]+', text):
            assert ".gpu" not in instruction and ".cta" not in instruction, (name, instruction)
            ordered = "acquire" in instruction or "release" in instruction
            assert not ordered or ".sys" in instruction, (name, instruction)
            found += ordered
    assert found >= 4


# Calls that block the host or other devices, or allocate. All are in the creation and the release
# of resources: of symmetric memory, pinned memory, error rings and copy streams.
BLOCKING_CALLS = {
    "cuda/cache/pinned_memory.cu": {"cudaHostRegister", "cudaHostUnregister"},
    "cuda/collectives/multicast.cu": {"cuMemCreate", "cuMemMap"},
    "cuda/collectives/symmetric_memory.cu": {
        "cudaFree",
        "cudaFreeHost",
        "cudaHostAlloc",
        "cudaMalloc",
        "cudaStreamSynchronize",
    },
    "cuda/common/device.cu": {"cudaEventSynchronize"},
    "cuda/common/error_ring.cu": {"cudaHostAlloc"},
    "cuda/transfer/async_copy.cu": {"cudaFree", "cudaMalloc", "cudaStreamSynchronize"},
}


def test_blocking_calls_are_where_resources_are_created_and_freed():
    blocking = re.compile(
        r"\b(cu(?:da)?(?:Malloc|Free|HostAlloc|HostRegister|HostUnregister|MemAlloc|MemCreate|MemMap"
        r"|\w*Synchronize)\w*)\("
    )
    found = {
        name: {*blocking.findall(text)}
        for name, text in sources(".cu", ".cuh", ".h", ".cc").items()
        if blocking.search(text)
    }
    assert found == BLOCKING_CALLS


def handlers() -> dict[str, str]:
    """The text of the definition of each handler for CUDA, by symbol."""
    definition = re.compile(r"XLA_FFI_DEFINE_HANDLER_SYMBOL\(\s*(\w+),(.*?)\);\n", re.DOTALL)
    return {
        symbol: body
        for text in sources(".cu").values()
        for symbol, body in definition.findall(text)
    }


def registered() -> dict[str, list[str]]:
    """The stages of each handler for CUDA in the module."""
    text = sources(".cc")["cuda/module.cc"].split("#ifdef JAXKV_CUDA\n  nb::dict cuda;")[1]
    named = dict(re.findall(r'(\w+) = stage\("(\w+)", note_stream<\w+>\)', text))
    calls = re.findall(r'add\(cuda, "\w+", (.*?)\);\n', text, re.DOTALL)
    stages = {}
    for call in calls:
        symbol = re.findall(r'stage\("execute", join_on_failure<(?:note_stream<)?(\w+)>+\)', call)[
            0
        ]
        inline = re.findall(r'stage\("(\w+)"', call)
        stages[symbol] = [*(named[name] for name in re.findall(r"^(\w+),", call)), *inline]
    return stages


def test_handlers_in_cuda_graphs():
    found = handlers()
    captured = {symbol for symbol, body in found.items() if "kCmdBufferCompatible" in body}
    assert captured == CAPTURED
    for symbol in captured:
        assert "PlatformStream" in found[symbol] or "Ctx<Stream>" in found[symbol]


def test_modules_are_loaded_before_the_first_execution():
    """A module that is loaded lazily can block while a collective of another device waits."""
    found = registered()
    without = {symbol for symbol, stages in found.items() if "initialize" not in stages}
    assert without - {"CopyBlocksUnordered"} == WITHOUT_INITIALIZATION
    assert set(found) >= CAPTURED
