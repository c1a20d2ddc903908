"""Recurrent states of hybrid models under speculative decoding."""

from jaxkv._src.recurrent.advance import advance as advance
from jaxkv._src.recurrent.align import StateKind as StateKind
from jaxkv._src.recurrent.align import align_postprocess as align_postprocess
from jaxkv._src.recurrent.align import align_preprocess as align_preprocess
from jaxkv._src.recurrent.align import can_skip_align_postprocess as can_skip_align_postprocess
from jaxkv._src.recurrent.deferred_counts import DeferredCounts as DeferredCounts
