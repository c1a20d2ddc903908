"""Packages are built without test hooks, and for all architectures, also after builds of `make`."""

import pathlib
import re
import shutil
import subprocess
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
CUDA = ROOT / "cuda"
HOOKS = re.compile(
    r"set_test_state|set_epoch|set_stall|stall_ns|stall_at_random|(?i:unordered(?!_map))"
)

pytestmark = [
    pytest.mark.host_only,
    pytest.mark.skipif(not CUDA.exists(), reason="needs a checkout"),
    pytest.mark.skipif(not shutil.which("g++"), reason="needs g++"),
]


def hooks_in(file: pathlib.Path, *options: str) -> set[str]:
    """Names of hooks in the code that remains after the preprocessor, without the headers."""
    source = re.sub(r"(?m)^ *# *include .*$", "", file.read_text())
    command = ["g++", "-E", "-P", "-x", "c++", *options, "-"]
    ran = subprocess.run(command, input=source, check=True, capture_output=True, text=True)
    return set(HOOKS.findall(ran.stdout))


def test_product_sources_have_no_hooks():
    settings = (ROOT / "CMakeLists.txt").read_text()
    [only_with_hooks] = re.findall(r"(?s)\nif\(JAXKV_TEST_HOOKS\)\n(.*?)endif\(\)", settings)
    left_out = [CUDA / "testing/communicator_state.h", CUDA / "testing/unordered_copy.cu"]
    files = sorted(file for file in CUDA.glob("**/*") if file.is_file() and file not in left_out)
    assert {str(file.relative_to(ROOT)): hooks_in(file) for file in files} == {
        str(file.relative_to(ROOT)): set() for file in files
    }
    with_hooks = [file.name for file in files if hooks_in(file, "-DJAXKV_TEST_HOOKS")]
    assert with_hooks == ["stall.h", "symmetric_memory.h", "module.cc"]
    assert settings.count("cuda/testing") == only_with_hooks.count("cuda/testing") == 1


def test_packages_are_built_without_hooks():
    settings = (ROOT / "CMakeLists.txt").read_text()
    assert re.search(r'option\(JAXKV_TEST_HOOKS "[^"]*" OFF\)', settings)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["scikit-build"]["cmake"]["define"]["JAXKV_TEST_HOOKS"] == "OFF"


def test_packages_are_built_for_all_architectures():
    """A CMake cache would keep those of `make` for settings that the project does not define."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    defined = project["tool"]["scikit-build"]["cmake"]["define"]
    set_by_make = re.findall(r"cmake\.define\.(\w+)", (ROOT / "Makefile").read_text())
    assert {"JAXKV_CUDA_ARCHITECTURES", "JAXKV_WERROR"} < set(set_by_make)
    assert set(set_by_make) - {"JAXKV_ASAN"} <= set(defined)  # `asan` has a build folder of its own
    listed = ";".join(defined["JAXKV_CUDA_ARCHITECTURES"])
    assert f"(`{listed}`)" in (ROOT / "docs/environment.md").read_text()
