"""`pcie`: the link of a GPU from NVML, and from sysfs without it."""

import ctypes

import pytest

from jaxkv._src.runtime import pcie
from jaxkv._src.runtime.pcie import PcieLink

pytestmark = pytest.mark.host_only

ADDRESS = "0000:1B:00.0"


class FakeNvml:
    """NVML with one GPU; `failing` is the name of a function that fails."""

    def __init__(self, failing: str | None = None) -> None:
        self.failing, self.calls = failing, list[str]()

    def __getattr__(self, name: str):
        def function(*arguments):
            self.calls.append(name)
            if name == self.failing:
                return 999
            if name == "nvmlDeviceGetHandleByPciBusId_v2":
                assert arguments[0] == ADDRESS.encode()
                arguments[1]._obj.value = 77
            elif name.startswith("nvmlDeviceGetMax"):
                assert arguments[0].value == 77
                arguments[1]._obj.value = 5 if name.endswith("Generation") else 16
            return 0

        return function


def test_nvml_reports_the_link_and_is_shut_down():
    nvml = FakeNvml()
    assert pcie._from_nvml(ADDRESS, nvml) == PcieLink(5, 16)
    assert (nvml.calls[0], nvml.calls[-1]) == ("nvmlInit_v2", "nvmlShutdown")


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetMaxPcieLinkWidth"]
)
def test_failed_nvml_call_raises_after_shutdown(function):
    nvml = FakeNvml(function)
    with pytest.raises(OSError, match=f"{function}: error 999"):
        pcie._from_nvml(ADDRESS, nvml)
    assert nvml.calls[-1] == "nvmlShutdown"


def test_failed_init_needs_no_shutdown():
    nvml = FakeNvml("nvmlInit_v2")
    with pytest.raises(OSError, match="nvmlInit_v2: error 999"):
        pcie._from_nvml(ADDRESS, nvml)
    assert nvml.calls == ["nvmlInit_v2"]


def sysfs(monkeypatch, tmp_path, device: tuple[str, str], slot: tuple[str, str] | None) -> None:
    folder = tmp_path / "devices/0000:00:01.0" / ADDRESS.lower()
    folder.mkdir(parents=True)
    for where, link in ((folder, device), (folder.parent, slot)):
        if link:
            (where / "max_link_speed").write_text(f"{link[0]}\n")
            (where / "max_link_width").write_text(f"{link[1]}\n")
    (tmp_path / "by_address").mkdir()
    (tmp_path / "by_address" / ADDRESS.lower()).symlink_to(folder)
    monkeypatch.setattr(pcie, "_SYSFS", tmp_path / "by_address")


def no_nvml(monkeypatch) -> None:
    def load(name: str):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)


@pytest.mark.parametrize(
    "device, slot, expected",
    [
        (("32.0 GT/s PCIe", "16"), None, PcieLink(5, 16)),
        (("32.0 GT/s PCIe", "16"), ("16.0 GT/s PCIe", "8"), PcieLink(4, 8)),
        (("16.0 GT/s PCIe", "16"), ("32.0 GT/s PCIe", "16"), PcieLink(4, 16)),
        (("Unknown", "0"), None, None),  # of an endpoint in a virtual machine
        (("32.0 GT/s PCIe", "many"), None, None),
    ],
)
def test_sysfs_without_nvml(monkeypatch, tmp_path, device, slot, expected):
    no_nvml(monkeypatch)
    sysfs(monkeypatch, tmp_path, device, slot)
    assert pcie.link_of(ADDRESS) == expected


def test_nvml_is_preferred(monkeypatch, tmp_path):
    sysfs(monkeypatch, tmp_path, ("16.0 GT/s PCIe", "16"), None)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeNvml())
    assert pcie.link_of(ADDRESS) == PcieLink(5, 16)


def test_unknown_device_has_no_link(monkeypatch, tmp_path):
    no_nvml(monkeypatch)
    monkeypatch.setattr(pcie, "_SYSFS", tmp_path)
    assert pcie.link_of(ADDRESS) is None


def test_rate_of_a_link():
    link = PcieLink(5, 16)
    assert str(link) == "PCIe 5 x16"
    assert link.mb_per_s == 63008
    assert PcieLink(4, 16).mb_per_s * 2 == link.mb_per_s
