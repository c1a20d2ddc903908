"""jaxkv.env reports what is available, gives a reason for the rest, and never fails."""

import ctypes
import json
import re
import subprocess
import sys

import jax
import pytest

from jaxkv._src.environment import driver, probes
from jaxkv._src.environment import report as environment_report
from jaxkv._src.tuning import copy_lookup

NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED


class FakeCuda:
    """libcuda of a machine with two GPUs of which only the first has peer access to the other.

    It has only the read-only queries, so that a report that allocates, creates a context or uses
    multicast objects fails here.
    """

    multicast_code = 0

    def cuInit(self, flags):
        return 0

    def cuGetErrorName(self, code, name):
        name._obj.value = b"CUDA_ERROR_NOT_SUPPORTED"
        return 0

    def cuDriverGetVersion(self, version):
        version._obj.value = 13010
        return 0

    def cuDeviceGetCount(self, count):
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, buffer, size, device):
        buffer.value = b"Fake GPU"
        return 0

    def cuDeviceGetPCIBusId(self, buffer, size, device):
        buffer.value = f"0000:{device + 0x1B:02X}:00.0".encode()
        return 0

    def cuDeviceTotalMem_v2(self, size, device):
        assert isinstance(size._obj, ctypes.c_size_t)
        size._obj.value = 150 << 30
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        known = {75: 9, 76: 0, 16: 132, 134: device}
        if attribute == 132:
            value._obj.value = 1
            return self.multicast_code
        value._obj.value = known[attribute]
        return 0

    def cuDeviceCanAccessPeer(self, result, device, peer):
        assert device != peer, "the driver has no answer for a device and itself"
        result._obj.value = device == 0
        return 0


@pytest.fixture
def cuda():
    return driver.Driver(FakeCuda())


@pytest.fixture
def no_nvidia_smi(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))


def with_nvidia_smi(monkeypatch, tmp_path, output):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{output}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_report_has_all_probes_and_is_json():
    report = environment_report.report()
    assert list(report) == list(environment_report.PROBES)
    assert json.loads(json.dumps(report)) == report


def test_report_reads_back_pinned_memory():
    pinned = environment_report.report()["pinned_host"]
    assert pinned == {
        "bytes": probes.PROBE_BYTES,
        "memory_kind": "pinned_host",
        "read_back_equal": True,
        "numa_nodes": pinned["numa_nodes"],
    }
    assert list(pinned["numa_nodes"]) == list(map(str, jax.local_devices()))
    for nodes in pinned["numa_nodes"].values():
        assert isinstance(nodes["of_pages"], dict) or nodes["of_pages"].startswith("unavailable")


def test_failed_probe_reports_reason_and_others_run(monkeypatch):
    def broken():
        raise RuntimeError("the fan is on fire")

    monkeypatch.setattr(environment_report, "PROBES", {"first": broken, "second": lambda: 2})
    assert environment_report.report() == {
        "first": "unavailable: RuntimeError: the fan is on fire",
        "second": 2,
    }


def test_gpu_attributes_are_reported(cuda, no_nvidia_smi):
    first, second = probes.gpus(cuda)
    assert first["name"] == "Fake GPU"
    assert first["compute_capability"] == "9.0"
    assert first["memory_bytes"] == 150 << 30
    assert first["multicast_supported"] is True
    assert (first["pci_address"], second["pci_address"]) == ("0000:1b:00.0", "0000:1c:00.0")
    assert (first["driver_numa_node"], second["driver_numa_node"]) == (0, 1)
    assert first["pcie_link"].startswith("unavailable: FileNotFoundError")


def test_pcie_links_are_matched_by_address(cuda, monkeypatch, tmp_path):
    with_nvidia_smi(
        monkeypatch,
        tmp_path,
        "00000000:1C:00.0, 1, 5, 16, 16\n00000000:1B:00.0, 4, 5, 8, 16",
    )
    first, second = probes.gpus(cuda)
    assert first["pcie_link"] == {"current": "gen 4 x8", "max": "gen 5 x16"}
    assert second["pcie_link"] == {"current": "gen 1 x16", "max": "gen 5 x16"}


def test_unexpected_nvidia_smi_output_keeps_gpus(cuda, monkeypatch, tmp_path):
    with_nvidia_smi(monkeypatch, tmp_path, "NVIDIA-SMI has failed")
    first, _ = probes.gpus(cuda)
    assert first["name"] == "Fake GPU"
    assert first["pcie_link"].startswith("unavailable: ValueError")


def test_failed_query_names_call_and_error(no_nvidia_smi):
    library = FakeCuda()
    library.multicast_code = NOT_SUPPORTED
    first, _ = probes.gpus(driver.Driver(library))
    assert first["multicast_supported"] == (
        "unavailable: RuntimeError: cuDeviceGetAttribute: CUDA_ERROR_NOT_SUPPORTED (801)"
    )
    assert first["name"] == "Fake GPU"


def test_peer_access_has_a_row_per_gpu(cuda):
    assert probes.peer_access(cuda) == [[True, True], [False, True]]


def test_driver_version(cuda):
    assert cuda.version() == "13.1"


@pytest.mark.gpu
def test_gpus_agree_with_jax():
    import jax

    found = probes.gpus()
    assert [gpu["name"] for gpu in found] == [d.device_kind for d in jax.local_devices()]
    assert [gpu["compute_capability"] for gpu in found] == [
        d.compute_capability for d in jax.local_devices()
    ]


@pytest.mark.gpu
def test_loaded_cuda_libraries_are_found():
    probes.devices()
    assert any(name.startswith("libcuda.so") for name in probes.cuda_libraries()["loaded"])


def test_memory_limits_equal_those_of_host_pool(monkeypatch):
    from jaxkv._src.cache import host_memory

    monkeypatch.setattr(host_memory, "_cgroup_limits", lambda: [("outer", 300), ("inner", 200)])
    assert probes.memory()["cgroup_available_bytes"] == 200
    monkeypatch.setattr(host_memory, "_cgroup_limits", lambda: [])
    assert probes.memory()["cgroup_available_bytes"] is None


def test_native_lists_the_targets_of_the_cpu_backend():
    assert "jaxkv_copy_blocks" in probes.native()["targets"]["cpu"]
    assert re.fullmatch(r"0\.\d+", probes.native()["ffi_api_of_jaxlib"])


def test_implementations_are_explained_for_every_operation():
    found = probes.implementations()
    for operation in ("load_pages", "store_pages", "swap_blocks"):
        texts = [text for name, text in found.items() if name.startswith(operation)]
        assert texts
        assert all(text.startswith(f"{operation}: ") and "pallas" in text for text in texts)


def test_tuning_names_the_tables_in_use(monkeypatch):
    table_for = copy_lookup.table_for  # of a GPU for which tables are shipped, not of this machine
    monkeypatch.setattr(copy_lookup, "table_for", lambda *_: table_for("NVIDIA H200"))
    tables = probes.tuning()
    assert all(table["name"].endswith(".json") for table in tables.values())
    assert "rules" not in tables["copies"]
    for rules in tables["all_reduce"]["rules"].values():
        assert rules[0].endswith(" from 0 bytes")


def test_directories_are_omitted():
    value = {
        "error": "OSError: cannot open '/home/someone/lib/libcuda.so.1': no such file",
        "variables": ["/opt/a/b:/opt/c", "--xla_dump_to=/home/someone/dump --other=1/2"],
        "kept": "nvidia/nccl/lib, 5/16 GB, 0000:1b:00.0, https://example.org/a/b",
        "number": 3,
    }
    assert environment_report.without_directories(value) == {
        "error": "OSError: cannot open '.../libcuda.so.1': no such file",
        "variables": [".../b:.../c", "--xla_dump_to=.../dump --other=1/2"],
        "kept": "nvidia/nccl/lib, 5/16 GB, 0000:1b:00.0, https://example.org/a/b",
        "number": 3,
    }


def test_environment_reports_only_relevant_variables(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_something=true")
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    addresses = "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS", "NCCL_COMM_ID"
    for name in addresses:
        monkeypatch.setenv(name, "node17.cluster.example:1234")
    assert probes.environment()["XLA_FLAGS"] == "--xla_something=true"
    assert "SECRET_TOKEN" not in probes.environment()
    assert {probes.environment()[name] for name in addresses} == {"(address omitted)"}


def test_text_is_readable():
    text = environment_report.to_text(
        {
            "kinds": ["a", "b"],
            "none": [],
            "limit": None,
            "gpus": [{"name": "x", "link": {"current": "gen 5"}}],
            "matrix": [[True, False]],
            "long": "one\ntwo",
        }
    )
    assert text.splitlines() == [
        "kinds: a, b",
        "none: none",
        "limit: none",
        "gpus:",
        "  0:",
        "    name: x",
        "    link:",
        "      current: gen 5",
        "matrix:",
        "  0: True, False",
        "long:",
        "  one",
        "  two",
    ]


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_command_line(flags):
    command = [sys.executable, "-m", "jaxkv.env", *flags]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    if flags:
        assert list(json.loads(output)) == list(environment_report.PROBES)
    else:
        assert "pinned_host:" in output.splitlines()
