"""Recurrent states (Mamba, convolution) under speculative decoding."""

from jaxkv._src.public_names import set_module as _set_module
from jaxkv._src.recurrent.advance import advance
from jaxkv._src.recurrent.align import (
    StateKind,
    align_postprocess,
    align_preprocess,
    can_skip_align_postprocess,
)
from jaxkv._src.recurrent.deferred_counts import DeferredCounts

__all__ = [
    "DeferredCounts",
    "StateKind",
    "advance",
    "align_postprocess",
    "align_preprocess",
    "can_skip_align_postprocess",
]

_set_module(globals())
