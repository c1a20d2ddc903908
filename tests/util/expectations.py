"""Replacements for those of pytest, which the processes of several ranks do not load."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def raises(kind: Any, pattern: str = "") -> Iterator[list[BaseException]]:
    caught: list[BaseException] = []
    try:
        yield caught
    except kind as error:
        assert re.search(pattern, str(error)), error
        caught.append(error)
    assert caught, f"no {kind}"


@contextmanager
def warns(pattern: str) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert any(re.search(pattern, str(warning.message)) for warning in caught), caught
