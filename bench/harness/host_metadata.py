"""Host baseline of attention metadata: NumPy, then one upload of the result.

Vectorized as in engines, without a Python loop over requests. All arrays are packed into one, as a
`device_put` costs the same for one array as for another; a program unpacks it.
"""

import math
from typing import Any

import jax
import numpy as np

from jaxkv.metadata import BatchMetadata


def tokens(batch: BatchMetadata) -> dict[str, Any]:
    """Positions, rows and slots of all query tokens."""
    query = np.diff(batch.query_start_loc)
    count = int(batch.query_start_loc[-1])
    row = np.repeat(np.arange(len(query), dtype=np.int32), query)
    first = batch.seq_lens - query - batch.query_start_loc[:-1]
    position = (first[row] + np.arange(count)).astype(np.int32)
    block = batch.block_table[row, position // batch.block_size]
    slots = np.full(batch.max_num_tokens, -1, np.int32)
    slots[:count] = block * batch.block_size + position % batch.block_size
    return {"positions": position, "rows": row, "slot_mapping": slots}


def flashinfer(batch: BatchMetadata) -> dict[str, Any]:
    """Concatenated page lists of all rows, padded to avoid recompilation."""
    blocks = -(-batch.seq_lens // batch.block_size)
    used = np.arange(batch.max_blocks) < blocks[:, None]
    indices = np.zeros(batch.block_table.size, np.int32)
    indices[: blocks.sum()] = batch.block_table[used]
    last = batch.seq_lens % batch.block_size
    return {
        "qo_indptr": batch.query_start_loc,
        "paged_kv_indptr": np.concatenate([[0], np.cumsum(blocks)]).astype(np.int32),
        "paged_kv_indices": indices,
        "paged_kv_last_page_len": np.where((last == 0) & (blocks > 0), batch.block_size, last),
    }


def ragged_paged(batch: BatchMetadata) -> dict[str, Any]:
    """Metadata of the JAX engines' kernels for ragged batches."""
    query = np.diff(batch.query_start_loc)
    decodes = int(np.argmax(np.append(query > 1, True)))
    return {
        "kv_lens": batch.seq_lens,
        "page_indices": batch.block_table.ravel(),
        "cu_q_lens": batch.query_start_loc,
        "distribution": np.array([decodes, decodes, len(query)], np.int32),
    }


def local_attention(batch: BatchMetadata, chunk: int) -> dict[str, Any]:
    """Rows split at multiples of `chunk` tokens, each piece a row of its own."""
    query, seq = np.diff(batch.query_start_loc), batch.seq_lens
    first = np.minimum(chunk - (seq - query) % chunk, query)
    pieces = 1 + -(-(query - first) // chunk)
    ends = np.cumsum(pieces)
    row = np.repeat(np.arange(len(query)), pieces)
    order = np.arange(ends[-1]) - np.repeat(ends - pieces, pieces)
    lens = np.minimum(query[row] - first[row] - chunk * (order - 1), chunk)
    lens = np.where(order == 0, first[row], lens)
    behind = pieces[row] - 1 - order
    last = (seq - 1) % chunk + 1
    columns = ((seq[row] - behind * chunk - last[row]) // batch.block_size)[:, None]
    columns = columns + np.arange(chunk // batch.block_size)
    return {
        "query_start_loc": np.concatenate([[0], np.cumsum(lens)]).astype(np.int32),
        "seq_lens": np.where(behind == 0, last[row], chunk).astype(np.int32),
        "block_table": batch.block_table[row[:, None], np.clip(columns, 0, batch.max_blocks - 1)],
    }


Layout = tuple[Any, tuple[tuple[int, ...], ...]]  # structure of a pytree, and shapes of its leaves


def packed(tree: Any) -> tuple[np.ndarray, Layout]:
    """int32 arrays of a pytree in one array, and its layout, which is hashable."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [np.asarray(leaf, np.int32) for leaf in leaves]
    flat = np.concatenate([array.ravel() for array in arrays])
    return flat, (structure, tuple(array.shape for array in arrays))


def unpacked(flat: jax.Array, layout: Layout) -> Any:
    """The pytree, in a program."""
    structure, shapes = layout
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    leaves = [
        flat[end - math.prod(shape) : end].reshape(shape)
        for end, shape in zip(ends, shapes, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)


def uploaded(tree: Any) -> tuple[jax.Array, Layout]:
    """The packed pytree on the device."""
    flat, layout = packed(tree)
    return jax.device_put(flat), layout
