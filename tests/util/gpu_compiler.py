"""XLA's compiler for an H200, on a machine without a GPU.

Programs are lowered on the CPU backend, whose arrays have the same memory kinds, and compiled by
the CUDA plugin for a description of the GPU. `make gpu-programs` installs the plugin below build/;
an environment that has it would try to start a CUDA backend.
"""

import functools
import importlib
import os
import re
import sys
from typing import Any

import jax
import pytest
from jax.experimental import topologies

from jaxkv._src.runtime import native
from jaxkv._src.transfer import dispatch
from tests.util.native_program import ROOT

PLUGIN = ROOT / "build/gpu_compiler"
H200 = dispatch.Machine("gpu", "NVIDIA H200", True)
DESCRIPTION = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""


def require() -> None:
    """Skips the test without the plugin, or without CUDA handlers in the extension."""
    if not PLUGIN.exists():
        pytest.skip("needs the CUDA plugin of jax: `make gpu-programs` installs and uses it")
    if not native.extension().CUDA:
        pytest.skip("needs an extension with CUDA handlers: JAXKV_CUDA=ON")


@functools.cache
def _devices(count: int) -> Any:
    if str(PLUGIN) not in sys.path:
        sys.path.append(str(PLUGIN))
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # asks the driver
        importlib.import_module("jax_plugins.xla_cuda13").initialize()
    return topologies.get_topology_desc(
        f"h200:1x1x{count}", "cuda", target_config=DESCRIPTION, topology=f"1x1x{count}"
    ).devices


def compiled(step: jax.stages.Wrapped, *args: Any, devices: int = 1) -> str:
    """The optimized and scheduled program of a jitted `step` on that number of H200s, as text."""
    from jax._src import compiler
    from jaxlib import _jax

    lowered = step.trace(*args).lower(lowering_platforms=("cuda",))
    described = tuple(_devices(devices))
    options = compiler.get_compile_options(num_replicas=1, num_partitions=devices)
    client = described[0].client
    program = client.compile(lowered.compiler_ir(), _jax.DeviceList(described), options)
    return "\n".join(module.to_string() for module in program.hlo_modules())


def copies(text: str) -> set[tuple[int, ...]]:
    """Shapes of all arrays that a program copies as a whole."""
    found = re.findall(r"= \(?\w+\[([\d,]*)\]\S* (?:\S+ )*?copy(?:-start)?\(", text)
    return {tuple(int(n) for n in dims.split(",") if n) for dims in found}


def calls(text: str) -> list[str]:
    """The lines of the calls of jaxkv's handlers, in the order of the schedule."""
    return [line for line in text.splitlines() if 'custom_call_target="jaxkv_' in line]


def schedule(text: str) -> list[str]:
    """Target or opcode of each instruction of the entry computation, in order."""
    entry = text[text.index("\nENTRY") :].splitlines()
    instruction = re.compile(r'custom_call_target="([^"]+)"|= .*? ([a-z][\w-]*)\(')
    found = []
    for line in entry:
        if match := re.search(r'custom_call_target="([^"]+)"', line) or instruction.search(line):
            found.append(match[match.lastindex or 0])
    return found
