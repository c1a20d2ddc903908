"""Attention metadata with static shapes, computed on the device: one module per backend."""

from jaxkv.metadata import cascade as cascade
from jaxkv.metadata import flash_attention as flash_attention
from jaxkv.metadata import flashinfer as flashinfer
from jaxkv.metadata import flex as flex
from jaxkv.metadata import gdn as gdn
from jaxkv.metadata import kv_sharing as kv_sharing
from jaxkv.metadata import local_attention as local_attention
from jaxkv.metadata import mamba as mamba
from jaxkv.metadata import prefix_lm as prefix_lm
from jaxkv.metadata import ragged_paged as ragged_paged
from jaxkv.metadata import tree as tree
from jaxkv.metadata import triton as triton
from jaxkv.metadata import turboquant as turboquant
from jaxkv.metadata.common import BatchMetadata as BatchMetadata
from jaxkv.metadata.common import dcp_local_seq_lens as dcp_local_seq_lens
from jaxkv.metadata.common import logits_indices as logits_indices
from jaxkv.metadata.common import num_computed_tokens as num_computed_tokens
from jaxkv.metadata.common import slot_mapping as slot_mapping
from jaxkv.metadata.common import token_positions as token_positions
from jaxkv.metadata.common import token_to_request as token_to_request
from jaxkv.metadata.common import unique_first_occurrence as unique_first_occurrence
from jaxkv.metadata.schedule import reorder_batch as reorder_batch
from jaxkv.metadata.schedule import seq_lens_upper_bound as seq_lens_upper_bound
from jaxkv.metadata.schedule import split_prefill_chunks as split_prefill_chunks
from jaxkv.metadata.splits import ExtendSplit as ExtendSplit
from jaxkv.metadata.splits import Reordered as Reordered
from jaxkv.metadata.splits import Split as Split
from jaxkv.metadata.splits import reorder_batch_on_device as reorder_batch_on_device
from jaxkv.metadata.splits import sections as sections
from jaxkv.metadata.splits import split_decodes_and_prefills as split_decodes_and_prefills
from jaxkv.metadata.splits import (
    split_decodes_prefills_and_extends as split_decodes_prefills_and_extends,
)
