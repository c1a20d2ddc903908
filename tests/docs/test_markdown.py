"""The Python blocks of README.md and docs/, run as written."""

import math
import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
ALL_PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
PAGES = [page for page in sorted(ROOT.glob("docs/*.md")) if "```python\n" in page.read_text()]

if not README.exists():
    pytest.skip("no documentation next to the tests", allow_module_level=True)
pytest.importorskip("sybil", reason="not among the packages of a GPU machine")

LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:jaxkv|cuda|tests|bench|examples|docs|tools)/[\w./*-]*)`")
MODULE = re.compile(r"-m ((?:jaxkv|bench|examples)[\w.]*)")


def run(page: Path, *, separately: bool) -> int:
    """Runs the blocks in one namespace, or in a new one each; returns their number."""
    from sybil import Sybil
    from sybil.evaluators.python import PythonEvaluator
    from sybil.parsers.markdown import CodeBlockParser

    parser = CodeBlockParser(language="python", evaluator=PythonEvaluator())
    document = Sybil([parser], path=str(ROOT)).parse(page)
    examples = list(document.examples())
    for example in examples:
        if separately:
            document.namespace.clear()
        example.evaluate()
    return len(examples)


def skip_without_devices(page: Path) -> None:
    """Skips a page with a mesh of more devices than there are."""
    meshes = re.findall(r"make_mesh\(\(([\d, ]+)\)", page.read_text())
    needed = max((math.prod(map(int, re.findall(r"\d+", shape))) for shape in meshes), default=1)
    if jax.device_count() < needed:
        pytest.skip(f"needs {needed} devices")


# JAX cannot reuse the ticket and the plan of a copy, which are donated with its handle.
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_blocks_run_in_order(page):
    skip_without_devices(page)
    assert run(page, separately=False) == page.read_text().count("```python\n")


def test_readme_blocks_run_independently():
    skip_without_devices(README)
    assert run(README, separately=True) == README.read_text().count("```python\n")


def test_failing_block_is_reported(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError):
        run(page, separately=False)


@pytest.mark.host_only
@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_relative_links_exist(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = [target.partition("#")[0] for target in LINK.findall(text)]
    local = [target for target in targets if target and ":" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.host_only
@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_paths_and_modules_exist(page):
    if page.name == "CHANGELOG.md":  # history
        return
    text = page.read_text()
    modules = [ROOT / name.replace(".", "/") for name in MODULE.findall(text)]
    assert [path for path in PATH.findall(text) if not any(ROOT.glob(path))] == []
    assert [
        module
        for module in modules
        if not (module.with_suffix(".py").exists() or (module / "__main__.py").exists())
    ] == []
