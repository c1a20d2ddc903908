"""Arrays of a step in one upload, not in one for each."""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import numpy as np


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["words", "others"],
    meta_fields=["structure", "forms"],
)
@dataclasses.dataclass(frozen=True)
class Packed:
    """A pytree, see `pack`.

    Attributes:
      words: int32[n], the elements of all NumPy leaves.
      others: the other leaves, such as ids that are in pinned host memory.
      structure: of the pytree.
      forms: shape and dtype of each NumPy leaf; None of the others.
    """

    words: Any
    others: tuple[Any, ...]
    structure: Any
    forms: tuple[tuple[tuple[int, ...], np.dtype] | None, ...]


def pack(tree: Any) -> Packed:
    """A pytree whose NumPy leaves become one array; outside jit.

    Raises:
      ValueError: elements of other than 4 bytes.
    """
    leaves, structure = jax.tree.flatten(tree)
    forms = tuple(
        (leaf.shape, leaf.dtype) if isinstance(leaf, (np.ndarray, np.generic)) else None
        for leaf in leaves
    )
    packed = [leaf for leaf, form in zip(leaves, forms, strict=True) if form]
    others = tuple(leaf for leaf, form in zip(leaves, forms, strict=True) if not form)
    for leaf in packed:
        if leaf.itemsize != 4:
            raise ValueError(f"pack: leaves of 4 bytes an element, got {leaf.dtype}")
    words = np.concatenate([leaf.reshape(-1).view(np.int32) for leaf in packed])
    return Packed(words, others, structure, forms)


def unpack(packed: Packed) -> Any:
    """The pytree, inside jit.

    The barrier makes XLA copy the leaves to its temporary memory. Otherwise kernels of all layers
    would read the upload, whose address changes from step to step, and XLA updates each CUDA graph
    with a changed address before its launch.
    """
    others, parts, start = iter(packed.others), [], 0
    for form in packed.forms:
        if form:
            shape, dtype = form
            part = packed.words[start : start + math.prod(shape)].reshape(shape)
            parts.append(jax.lax.bitcast_convert_type(part, dtype))
            start += math.prod(shape)
    copied = iter(jax.lax.optimization_barrier(parts))
    leaves = [next(copied if form else others) for form in packed.forms]
    return jax.tree.unflatten(packed.structure, leaves)
