"""Public module names of exported objects."""

from __future__ import annotations

from typing import Any


def set_module(namespace: dict[str, Any]) -> None:
    """Sets `__module__` of all objects in `__all__` of a public module.

    Tracebacks, reprs, pickles and Sphinx then use `jaxkv.load_pages`, not the defining module below
    `jaxkv._src`.

    Args:
      namespace: `globals()` of the public module.
    """
    for name in namespace["__all__"]:
        if hasattr(namespace[name], "__module__"):  # modules do not have it
            namespace[name].__module__ = namespace["__name__"]
