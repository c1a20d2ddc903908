"""Attention metadata with static shapes, computed on the device: one module a backend."""

from jaxkv.metadata import flashinfer as flashinfer
from jaxkv.metadata import ragged_paged as ragged_paged
from jaxkv.metadata import schedule as schedule
from jaxkv.metadata import triton as triton
from jaxkv.metadata import turboquant as turboquant
from jaxkv.metadata.common import BatchMetadata as BatchMetadata
from jaxkv.metadata.common import Split as Split
from jaxkv.metadata.common import dcp_local_seq_lens as dcp_local_seq_lens
from jaxkv.metadata.common import logits_indices as logits_indices
from jaxkv.metadata.common import num_computed_tokens as num_computed_tokens
from jaxkv.metadata.common import slot_mapping as slot_mapping
from jaxkv.metadata.common import split_decodes_and_prefills as split_decodes_and_prefills
from jaxkv.metadata.common import token_positions as token_positions
from jaxkv.metadata.common import token_to_request as token_to_request
