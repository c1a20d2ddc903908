"""Sparse attention over a KV cache in host memory: only the chosen rows are in HBM."""

from jaxkv._src.public_names import set_module as _set_module
from jaxkv._src.sparse.fetch import append, fetch
from jaxkv._src.sparse.state import SparseState, release

__all__ = ["SparseState", "append", "fetch", "release"]

_set_module(globals())
