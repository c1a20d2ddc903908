"""The public names of `jaxkv`: complete, documented, and named as users import them."""

import inspect
import pickle
import pydoc
import re
import subprocess
import sys
import types

import pytest

import jaxkv

pytestmark = pytest.mark.host_only

MODULES = (jaxkv, jaxkv.recurrent)
OBJECTS = [
    pytest.param(module, name, id=f"{module.__name__}.{name}")
    for module in MODULES
    for name in module.__all__
    if not isinstance(getattr(module, name), types.ModuleType)
]
SECTION = re.compile(r"^(Args|Attributes):$", re.MULTILINE)
EXAMPLE = re.compile(r"^\S.*\n\n    \S", re.MULTILINE)  # an indented block below a paragraph


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_all_lists_the_public_attributes(module):
    """In a new process: tests import `jaxkv.env` and others, which then are attributes too."""
    program = f"import {module.__name__} as m; print(*(n for n in vars(m) if n[0] != '_'))"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert sorted(run.stdout.split()) == sorted(module.__all__)
    assert len(set(module.__all__)) == len(module.__all__)


@pytest.mark.parametrize("module, name", OBJECTS)
def test_objects_are_named_as_they_are_imported(module, name):
    value = getattr(module, name)
    assert (value.__module__, value.__qualname__) == (module.__name__, name)
    assert pickle.loads(pickle.dumps(value)) is value


@pytest.mark.parametrize("module, name", OBJECTS)
def test_docstrings_have_arguments_or_an_example(module, name):
    value = getattr(module, name)
    text = inspect.cleandoc(value.__doc__ or "")
    is_signature = text.startswith(f"{name}(")  # made by dataclasses
    assert text and not is_signature
    is_error = inspect.isclass(value) and issubclass(value, Exception)
    assert SECTION.search(text) or EXAMPLE.search(text) or is_error


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_help_lists_every_function(module):
    text = pydoc.plain(pydoc.render_doc(module))
    functions = text.partition("\nFUNCTIONS\n")[2]
    for name in module.__all__:
        if inspect.isfunction(getattr(module, name)):
            assert f"\n    {name}(" in f"\n{functions}", name
