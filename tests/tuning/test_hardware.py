"""`hardware_of`: properties of a GPU, for the selection of tuning tables."""

import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv._src.runtime.pcie import PcieLink
from jaxkv._src.transfer import dispatch
from jaxkv._src.tuning import copy_lookup, hardware
from jaxkv._src.tuning.hardware import Hardware


@pytest.mark.host_only
def test_hardware_is_queried_for_unknown_kinds_only(monkeypatch):
    asked = []
    monkeypatch.setattr(dispatch, "hardware_of", lambda device: asked.append(device))
    monkeypatch.setattr(copy_lookup, "is_packaged", lambda kind: True)
    assert dispatch._machine().hardware is None and asked == []
    monkeypatch.setattr(copy_lookup, "is_packaged", lambda kind: False)
    dispatch._machine()
    assert asked == [jax.local_devices()[0]]


@pytest.mark.host_only
@pytest.mark.parametrize("link, expected", [(PcieLink(5, 16), (5, 16)), (None, (None, None))])
def test_hardware_of_a_gpu(monkeypatch, link, expected):
    device = SimpleNamespace(
        platform="gpu",
        client=SimpleNamespace(platform_version="cuda 13"),
        compute_capability="9.0",
        core_count=132,
        local_hardware_id=3,
    )
    extension = SimpleNamespace(CUDA=True, pci_address=lambda ordinal: f"0000:{ordinal:02}:00.0")
    monkeypatch.setattr(hardware.native, "extension", lambda: extension)
    monkeypatch.setattr(hardware.pcie, "link_of", {"0000:03:00.0": link}.__getitem__)
    hardware_of = hardware.hardware_of.__wrapped__  # without its cache
    assert hardware_of(device) == Hardware("9.0", 132, *expected)
    extension.CUDA = False
    assert hardware_of(device) == Hardware("9.0", 132)
    device.client.platform_version = "rocm 7"
    assert hardware_of(device) is None


def test_explain_names_the_tables_behind_a_derived_rule(monkeypatch):
    a100 = dispatch.Machine("gpu", "A100", True, Hardware("8.0", 108, 4, 16))
    monkeypatch.delenv(copy_lookup.VARIABLE, raising=False)
    monkeypatch.setattr(dispatch, "_machine", lambda: a100)
    host, device = (
        jax.ShapeDtypeStruct((4096, 32768), np.int8, sharding=sharding)
        for kind in ("pinned_host", "device")
        for sharding in [jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)]
    )
    ids = jaxkv.HostIds(np.arange(1000))
    text = jaxkv.explain(jaxkv.swap_blocks, host, device, ids, ids)
    # Which implementation, and after how many tables, depends on the GPUs that have one.
    assert re.match(r"swap_blocks: \w+ \(best supported", text) and "GB/s" not in text
    assert re.search(r"by derived from nvidia_.*h200.json .* 8.0, PCIe 4 x16: load, ", text)
