"""Pytree structures in error messages."""

from __future__ import annotations

import jax
from jax.tree_util import PyTreeDef, keystr, tree_flatten_with_path


def leaf_paths(structure: PyTreeDef) -> list[str]:
    """The path of each leaf, such as "[0]['k']"."""
    numbered = jax.tree.unflatten(structure, range(structure.num_leaves))
    return [keystr(path) for path, _ in tree_flatten_with_path(numbered)[0]]


def structure_difference(expected: PyTreeDef, got: PyTreeDef) -> str:
    """The numbers of leaves, and the first leaf that only one of the structures has."""
    wanted, paths = leaf_paths(expected), leaf_paths(got)
    text = f"expected {len(wanted)} arrays, got {len(paths)}"
    for sign, some, others in (("missing", wanted, paths), ("unexpected", paths, wanted)):
        only = [path for path in some if path not in set(others)]
        if only:
            return f"{text}: {only[0] or 'a single array'} is {sign}"
    return f"{text}, in containers of other types: {expected} and {got}"
