// Metadata of FlashInfer's paged wrappers in one kernel; jaxkv/metadata/flashinfer.py is the
// reference.
//
// Every thread block scans all rows, in shared memory: a few microseconds faster than a separate
// kernel for the scan. The thread blocks then divide tokens, pages and rows among them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "metadata/flashinfer.h"

namespace jaxkv::metadata {

inline constexpr uint32_t kFlashInferThreads = 256;
inline constexpr int32_t kPadSlot = -1, kNullBlock = 0;

// Starts of the decodes or the prefills.
struct PagedPart {
  int32_t *qo_indptr, *kv_indptr, *last_page_len;  // [rows + 1], [rows + 1], [rows]
};

struct FlashInferSizes {
  uint32_t rows, columns, tokens, max_pages;
  int32_t block_size, decode_threshold;
};

struct FlashInferParams : FlashInferSizes {
  const int32_t *query_start_loc, *seq_lens, *block_table, *num_reqs, *num_tokens;
  int32_t *slots, *pages;  // [tokens], [max_pages]
  int32_t *num_decodes, *num_prefills, *num_decode_tokens, *num_prefill_tokens, *total_pages;
  PagedPart decode, prefill;
};

inline constexpr size_t kFlashInferOperands = 5, kFlashInferResults = 13;

// The operands and results of the handler, in its order.
inline FlashInferParams flash_infer_params(FlashInferSizes sizes, const int32_t* const* operands,
                                           int32_t* const* results) {
  return {sizes,
          operands[0],
          operands[1],
          operands[2],
          operands[3],
          operands[4],
          results[0],
          results[1],
          results[2],
          results[3],
          results[4],
          results[5],
          results[6],
          {results[7], results[8], results[9]},
          {results[10], results[11], results[12]}};
}

inline uint32_t flash_infer_shared_words(uint32_t rows) { return 2 * (rows + 1); }

// The first row that ends after `position`, `rows` if there is none; `starts` is [rows + 1].
__device__ inline uint32_t row_of(const int32_t* starts, uint32_t rows, int32_t position) {
  uint32_t first = 0, last = rows;
  while (first < last) {
    const uint32_t middle = (first + last) / 2;
    if (starts[middle + 1] > position) {
      last = middle;
    } else {
      first = middle + 1;
    }
  }
  return first;
}

// The rows of a batch, the same in every thread block.
struct Rows {
  int32_t* query;   // starts of the query tokens, [rows + 1]
  int32_t* indptr;  // starts of the pages, [rows + 1]
  uint32_t decodes;
};

// `total` plus the values of the preceding threads and of this one. Adds the sum of all threads to
// `total`, which is equal in all threads. `sums` has room for one value per warp.
__device__ inline int32_t scan(int32_t value, int32_t* sums, int32_t& total) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t sum = value;
  for (uint32_t step = 1; step < 32; step *= 2) {
    const auto before = static_cast<int32_t>(__shfl_up_sync(~0u, static_cast<uint32_t>(sum), step));
    if (lane >= step) sum += before;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  sum += total;
  for (uint32_t w = 0; w < kFlashInferThreads / 32; ++w) {
    if (w < warp) sum += sums[w];
    total += sums[w];
  }
  __syncthreads();
  return sum;
}

__device__ inline Rows scan_rows(const FlashInferParams& p, int32_t* shared) {
  __shared__ int32_t sums[kFlashInferThreads / 32];
  __shared__ uint32_t first_other;  // the first row whose query differs from that of row 0
  Rows rows{shared, shared + p.rows + 1, 0};
  if (threadIdx.x == 0) {
    first_other = p.rows;
    rows.indptr[0] = 0;
  }
  const int32_t query0 = p.query_start_loc[1] - p.query_start_loc[0];
  int32_t total = 0;
  int any_long = 0;
  uint32_t other = p.rows;
  for (uint32_t first = 0; first < p.rows; first += kFlashInferThreads) {
    const uint32_t row = first + threadIdx.x;
    int32_t pages = 0;
    if (row < p.rows) {
      const int32_t start = p.query_start_loc[row], end = p.query_start_loc[row + 1];
      rows.query[row] = start;
      if (row + 1 == p.rows) rows.query[p.rows] = end;
      any_long |= end - start > p.decode_threshold;
      if (end - start != query0 && end != start) other = min(other, row);
      const int32_t length = p.seq_lens[row];
      pages = length > 0 ? (length - 1) / p.block_size + 1 : 0;
    }
    const int32_t end = scan(pages, sums, total);
    if (row < p.rows) rows.indptr[row + 1] = end;
  }
  if (other < p.rows) atomicMin(&first_other, other);
  any_long = __syncthreads_or(any_long);
  uint32_t decodes = static_cast<uint32_t>(*p.num_reqs);
  // Queries of one token are uniform, whatever the other rows; see split_decodes_and_prefills.
  if (p.decode_threshold > 1 || any_long) decodes = min(decodes, first_other);
  if (query0 > p.decode_threshold) decodes = 0;
  rows.decodes = decodes;
  return rows;
}

__device__ inline int32_t slot_of(const FlashInferParams& p, const Rows& rows, uint32_t token) {
  const auto position_in_batch = static_cast<int32_t>(token);
  if (position_in_batch >= rows.query[p.rows]) return kPadSlot;
  const uint32_t row = row_of(rows.query, p.rows, position_in_batch);
  const int32_t position = p.seq_lens[row] - rows.query[row + 1] + position_in_batch;
  const int32_t column = position / p.block_size;
  if (position < 0 || column >= static_cast<int32_t>(p.columns)) return kPadSlot;
  const int32_t block = p.block_table[static_cast<size_t>(row) * p.columns + column];
  return block * p.block_size + position % p.block_size;
}

__device__ inline int32_t page_at(const FlashInferParams& p, const Rows& rows, uint32_t index) {
  const auto position = static_cast<int32_t>(index);
  if (position >= rows.indptr[p.rows]) return kNullBlock;
  const uint32_t row = row_of(rows.indptr, p.rows, position);
  const auto column = static_cast<uint32_t>(position - rows.indptr[row]);
  return p.block_table[static_cast<size_t>(row) * p.columns + min(column, p.columns - 1)];
}

// Entry `i` of the starts of the rows [first, first + count), and of their last pages.
__device__ inline void write_part(const FlashInferParams& p, const Rows& rows,
                                  const PagedPart& part, uint32_t first, uint32_t count,
                                  uint32_t i) {
  const uint32_t row = min(first + min(i, count), p.rows);
  part.qo_indptr[i] = rows.query[row] - rows.query[min(first, p.rows)];
  const bool truncated = p.max_pages < p.rows * p.columns;
  const int32_t pages = rows.indptr[row];
  part.kv_indptr[i] = truncated ? min(pages, static_cast<int32_t>(p.max_pages)) : pages;
  if (i == p.rows) return;
  const int32_t length = i < count ? p.seq_lens[min(first + i, p.rows - 1)] : 0;
  part.last_page_len[i] = length > 0 ? (length - 1) % p.block_size + 1 : 0;
}

__device__ inline void build_flash_infer(const FlashInferParams& p, int32_t* shared) {
  const Rows rows = scan_rows(p, shared);
  const auto reqs = static_cast<uint32_t>(*p.num_reqs);
  const uint32_t first = blockIdx.x * kFlashInferThreads + threadIdx.x;
  const uint32_t step = gridDim.x * kFlashInferThreads;
  for (uint32_t i = first; i < p.tokens; i += step) p.slots[i] = slot_of(p, rows, i);
  for (uint32_t i = first; i < p.max_pages; i += step) p.pages[i] = page_at(p, rows, i);
  for (uint32_t i = first; i <= p.rows; i += step) {
    write_part(p, rows, p.decode, 0, rows.decodes, i);
    write_part(p, rows, p.prefill, rows.decodes, reqs - rows.decodes, i);
  }
  if (first != 0) return;
  const int32_t tokens =
      rows.decodes < reqs ? rows.query[min(rows.decodes, p.rows)] : *p.num_tokens;
  *p.num_decodes = static_cast<int32_t>(rows.decodes);
  *p.num_prefills = static_cast<int32_t>(reqs - rows.decodes);
  *p.num_decode_tokens = tokens;
  *p.num_prefill_tokens = *p.num_tokens - tokens;
  *p.total_pages = rows.indptr[p.rows];
}

}  // namespace jaxkv::metadata
