"""Machine code in the built extension, as the compiler left it: registers and memory order.

Needs cuobjdump (package nvidia-cuda-cuobjdump), which needs no GPU.
"""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from jaxkv._src.runtime import native

# Bytes of local memory of a thread, over all architectures. Every other kernel has none.
FRAME = 16  # of the functions that are called while a wait is long, which are not inlined
ALLOWED = {
    # 64 registers, so that 4 blocks of 4 ranks fit an SM, or 1,024 threads of a copy.
    r"all_reduce_kernel\w*Li4ELNS0_5RouteE[02]": 64,  # low_latency, two_shot
    r"copy_blocksILi\d+E5uint4": 40,
    r"copy_blocksILi256E": 16,
    r"sparse7look_up": 32,  # one block of 1,024 threads for each request
    r"copy_groupILi": 72,
    # 128 registers; compared with the copies that it issues, decoding is cheap.
    r"align_states": 112,
    r"all_reduce_kernel\w*Li[68]ELNS0_5RouteE3": 32,  # multimem
    r"all_reduce_kernel": FRAME,
}
# Kernels with flags that other devices or the host read; one dtype and number of ranks each.
FLAGS = r"all_reduce_kernelINS1_8Bfloat16ELi2E|copy_blocksILi8E5uint4Lb1ELb1E|wait_for_copy"


@pytest.fixture(scope="module")
def cuobjdump():
    """`cuobjdump(*options)`: its output for the extension."""
    extension = native.extension()
    if not extension.CUDA:
        pytest.skip("needs an extension with CUDA handlers")
    spec = importlib.util.find_spec("nvidia")
    folders = (spec.submodule_search_locations or []) if spec else []
    packaged = [pathlib.Path(folder, "cu13/bin/cuobjdump") for folder in folders]
    tool: str = shutil.which("cuobjdump") or next((str(p) for p in packaged if p.exists()), "")
    if not tool:
        pytest.skip("needs cuobjdump: pip install nvidia-cuda-cuobjdump")
    path = os.pathsep.join([*(str(p.parent) for p in packaged), os.environ["PATH"]])

    def run(*options: str) -> str:
        if "-sass" in options and not shutil.which("nvdisasm", path=path):
            pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
        command = [tool, *options, str(extension.__file__)]
        environment = {**os.environ, "PATH": path}
        return subprocess.run(
            command, check=True, capture_output=True, text=True, env=environment
        ).stdout

    return run


def usage(text: str) -> Iterator[tuple[str, str, int]]:
    """Architecture, kernel, and bytes of its local memory."""
    architecture = kernel = ""
    for line in text.splitlines():
        if match := re.match(r"arch = (\w+)", line):
            architecture = match[1]
        elif match := re.match(r" Function (\w+):", line):
            kernel = match[1]
        elif match := re.match(r"  REG:\d+ STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", line):
            yield architecture, kernel, int(match[1]) + int(match[2])


def narrow(body: str) -> set[str]:
    """Ordered accesses whose scope is not the system. L1 is bypassed for data that a flag at system
    scope has announced: 16 bytes, which are not ordered."""
    operations = re.findall(r"\b(?:LD|ST)G?\.[\w.]*STRONG[\w.]*", body)
    return {op for op in operations if not op.endswith(".SYS") and ".128.STRONG.GPU" not in op}


@pytest.mark.host_only
def test_what_is_found_in_the_output_of_cuobjdump():
    text = """arch = sm_90a
 Function kernel_a:
  REG:64 STACK:24 SHARED:0 LOCAL:8 CONSTANT[0]:1
 Function kernel_b:
  REG:32 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:1"""
    assert [*usage(text)] == [("sm_90a", "kernel_a", 32), ("sm_90a", "kernel_b", 0)]
    good = "STG.E.64.STRONG.SYS [R2] LDG.E.128.STRONG.GPU R4 LD.E.64.STRONG.SYS R6"
    assert narrow(good + " ATOMG.E.ADD.STRONG.GPU") == set()
    wrong = "STG.E.64.STRONG.GPU [R2], R4 LD.E.64.STRONG.SM R6"
    assert narrow(wrong) == {"STG.E.64.STRONG.GPU", "LD.E.64.STRONG.SM"}


def test_only_listed_kernels_spill_registers(cuobjdump):
    found = list(usage(cuobjdump("--dump-resource-usage")))
    assert len({kernel for _, kernel, _ in found}) > 50
    excess = []
    for architecture, kernel, local in found:
        allowed = next((b for name, b in ALLOWED.items() if re.search(name, kernel)), 0)
        if local > allowed:
            excess.append(f"{architecture} {kernel}: {local} bytes, allowed {allowed}")
    assert not excess


def test_flags_are_read_and_written_at_system_scope(cuobjdump):
    """`.gpu` or `.cta` would not order anything for the host and other devices."""
    found = list(usage(cuobjdump("--dump-resource-usage")))
    architecture = "sm_90a" if any(a == "sm_90a" for a, _, _ in found) else found[0][0]
    kernels = sorted({k for a, k, _ in found if a == architecture and re.search(FLAGS, k)})
    assert len(kernels) == 5 + 1 + 1  # one for each route
    text = cuobjdump("-sass", "-arch", architecture, "-fun", ",".join(kernels))
    bodies = [
        body for body in re.split(r"\n\s+Function : ", text)[1:] if body.split()[0] in kernels
    ]
    assert len(bodies) >= len(kernels)
    for body in bodies:
        kernel = body.split()[0]
        assert not narrow(body), kernel
        assert ".SYS" in body, kernel
        if "wait_for_copy" not in kernel:  # it only reads
            assert re.search(r"MEMBAR\.\w+\.SYS", body), kernel
