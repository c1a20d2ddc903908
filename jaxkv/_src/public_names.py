"""Names of public objects: those of the module that users import them from."""

from __future__ import annotations

from typing import Any


def set_module(namespace: dict[str, Any]) -> None:
    """Sets `__module__` of what a public module lists in `__all__`.

    Tracebacks, reprs, pickles and Sphinx then name `jaxkv.load_pages`, not the module below
    `jaxkv._src` that defines it.

    Args:
      namespace: `globals()` of the public module.
    """
    for name in namespace["__all__"]:
        if hasattr(namespace[name], "__module__"):  # modules have none
            namespace[name].__module__ = namespace["__name__"]
