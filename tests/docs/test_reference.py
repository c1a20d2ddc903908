"""The reference pages are complete: every public name, every environment variable."""

import re
import types
from pathlib import Path

import pytest

import jaxkv

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "docs").exists():
    pytest.skip("no documentation next to the tests", allow_module_level=True)

pytestmark = pytest.mark.host_only
SETTING = re.compile(r"""["'](JAXKV_[A-Z_]+)["']""")
CMAKE_SETTING = re.compile(r"^(?:option\(|set\((?=\w+ \S+ CACHE))(JAXKV_\w+)", re.MULTILINE)


@pytest.mark.parametrize(
    "module",
    [jaxkv, jaxkv.offload, jaxkv.recurrent, jaxkv.sparse],
    ids=lambda module: module.__name__,
)
def test_api_page_lists_every_public_name(module):
    text = (ROOT / "docs" / "api.md").read_text()
    listed = set(re.findall(rf"{module.__name__}\.([A-Za-z_]+)", text))
    public = {
        name for name in module.__all__ if not isinstance(getattr(module, name), types.ModuleType)
    }
    assert public - listed == set()


def test_environment_page_lists_every_variable():
    sources = [
        path for folder in ("jaxkv", "bench", "tools") for path in ROOT.glob(f"{folder}/**/*.py")
    ]
    used = {name for path in sources for name in SETTING.findall(path.read_text())}
    used |= {*CMAKE_SETTING.findall((ROOT / "CMakeLists.txt").read_text())}
    listed = set(re.findall(r"JAXKV_[A-Z_]+", (ROOT / "docs" / "environment.md").read_text()))
    assert used
    assert used == listed
