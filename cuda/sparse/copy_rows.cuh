// Copies of the rows that a look-up has listed: from the pool to the hot buffer, or new rows to
// either of them.
//
// The 128-byte lines of all missing rows are one sequence, of which each warp takes an equal,
// contiguous part: the rate does not depend on the size of a row, nor on how the missing rows are
// spread over the requests, and few missing rows still occupy all warps. A line of the pool is read
// by one transaction on the link, wherever a row begins in it.
#pragma once

#include "common/ptx.cuh"
#include "sparse/rows.h"

namespace jaxkv::sparse {

inline constexpr uint32_t kCopyThreads = 512;
inline constexpr uint32_t kWordsInFlight = 8;  // per thread
inline constexpr uint32_t kLineWords = 8;
inline constexpr uint32_t kLinesOfWarp = 32 / kLineWords;  // read by one load of all its lanes

struct CopyParams {
  RowAddresses addresses;
  const RowMove* moves;
  const int32_t* counts;  // null for an append
  uint32_t num_requests;
  Divisor num_ids;
  uint32_t slots;
  Divisor row_words, row_lines;  // lines of the pool that a row may span
};

// Maximum number of lines that a row of the pool spans.
inline int32_t lines_of_row(const RowAddresses& addresses) {
  constexpr int64_t kLineBytes = kLineWords * kWordBytes;
  const auto base = static_cast<int64_t>(reinterpret_cast<uintptr_t>(addresses.pool));
  const bool aligned = (base | addresses.page_stride | addresses.token_stride) % kLineBytes == 0;
  const int64_t before = aligned ? 0 : kLineBytes - kWordBytes;
  return static_cast<int32_t>((before + addresses.row_bytes + kLineBytes - 1) / kLineBytes);
}

// prefix[r]: number of moves of the requests before r. `of_warps` is shared memory.
inline __device__ void sum_counts(const CopyParams& p, uint32_t* prefix, uint32_t* of_warps) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t before = 0;  // moves of the requests of earlier iterations
  for (uint32_t first = 0; first < p.num_requests; first += blockDim.x) {
    const uint32_t request = first + threadIdx.x;
    const uint32_t count = request < p.num_requests ? p.counts[request] : 0;
    uint32_t inclusive = count;
    for (uint32_t step = 1; step < 32; step *= 2) {
      const uint32_t below = __shfl_up_sync(~0u, inclusive, step);
      if (lane >= step) inclusive += below;
    }
    if (lane == 31) of_warps[warp] = inclusive;
    __syncthreads();
    uint32_t total = 0;
    for (uint32_t w = 0; w < blockDim.x / 32; ++w) {
      if (w < warp) inclusive += of_warps[w];
      total += of_warps[w];
    }
    if (request < p.num_requests) prefix[request + 1] = before + inclusive;
    before += total;
    __syncthreads();
  }
  if (threadIdx.x == 0) prefix[0] = 0;
  __syncthreads();
}

// The last request whose moves begin at or before `move`.
inline __device__ uint32_t request_of(const uint32_t* prefix, uint32_t num_requests,
                                      uint32_t move) {
  uint32_t low = 0, high = num_requests - 1;
  while (low < high) {
    const uint32_t middle = (low + high + 1) / 2;
    if (prefix[middle] <= move) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// The lines of a warp: a multiple of what a load reads. Warps with adjacent lines are on different
// SMs.
struct LineRange {
  uint32_t begin, end;
};
inline __device__ LineRange lines_of_warp(uint32_t lines) {
  const uint32_t warps = gridDim.x * (blockDim.x / 32);
  const uint32_t warp = threadIdx.x / 32 * gridDim.x + blockIdx.x;
  const uint32_t loads = (lines + kLinesOfWarp - 1) / kLinesOfWarp, each = loads / warps;
  const uint32_t longer = loads - each * warps;  // warps with one load more
  const uint32_t first = warp * each + min(warp, longer);
  const uint32_t last = first + each + (warp < longer);
  return {first * kLinesOfWarp, min(last * kLinesOfWarp, lines)};
}

inline __device__ void copy_missing_rows(const CopyParams& p, uint32_t* prefix,
                                         uint32_t* of_warps) {
  sum_counts(p, prefix, of_warps);
  const auto [begin, end] = lines_of_warp(prefix[p.num_requests] * p.row_lines.value());
  if (begin >= end) return;
  const uint32_t lane = threadIdx.x % 32;
  uint32_t request = request_of(prefix, p.num_requests, p.row_lines.quotient(begin));
  for (uint32_t first = begin; first < end; first += kLinesOfWarp * kWordsInFlight) {
    RowMove moves[kWordsInFlight];
    int64_t rows[kWordsInFlight];  // of the hot buffer, without the slot
    uint32_t offsets[kWordsInFlight];
#pragma unroll
    for (uint32_t u = 0; u < kWordsInFlight; ++u) {
      const uint32_t line = first + u * kLinesOfWarp + lane / kLineWords;
      const uint32_t move = p.row_lines.quotient(min(line, end - 1));
      while (move >= prefix[request + 1]) ++request;
      moves[u] = p.moves[request * p.num_ids.value() + move - prefix[request]];
      rows[u] = int64_t{request} * p.slots;
      offsets[u] =
          line < end ? (line - move * p.row_lines.value()) * kLineWords + lane % kLineWords : ~0u;
    }
    uint4 loaded[kWordsInFlight];
    uint4* to[kWordsInFlight];
#pragma unroll
    for (uint32_t u = 0; u < kWordsInFlight; ++u) {
      const auto* from = reinterpret_cast<const uint4*>(p.addresses.of_token(moves[u].token));
      const auto before = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from) / kWordBytes);
      const uint32_t offset = offsets[u] - before % kLineWords;
      const bool in_row = offsets[u] != ~0u && offset < p.row_words.value();
      to[u] = nullptr;
      if (!in_row) continue;
      loaded[u] = __ldcs(from + offset);
      to[u] = reinterpret_cast<uint4*>(p.addresses.of_slot(rows[u] + moves[u].slot)) + offset;
    }
#pragma unroll
    for (uint32_t u = 0; u < kWordsInFlight; ++u) {
      if (to[u]) *to[u] = loaded[u];
    }
  }
}

template <bool kToPool>
__device__ void copy_added_rows(const CopyParams& p) {
  const uint32_t words = p.num_requests * p.num_ids.value() * p.row_words.value();
  for (uint32_t word = blockIdx.x * blockDim.x + threadIdx.x; word < words;
       word += gridDim.x * blockDim.x) {
    const uint32_t entry = p.row_words.quotient(word);
    const uint32_t offset = word - entry * p.row_words.value();
    const auto [token, slot] = p.moves[entry];
    if (slot == kNoRow) continue;
    const uint4 value = __ldcs(reinterpret_cast<const uint4*>(p.addresses.added) + word);
    const auto row = int64_t{p.num_ids.quotient(entry)} * p.slots + slot;
    std::byte* to = kToPool ? p.addresses.of_token(token) : p.addresses.of_slot(row);
    reinterpret_cast<uint4*>(to)[offset] = value;
  }
}

__global__ void __launch_bounds__(kCopyThreads) copy_missing(const __grid_constant__ CopyParams p) {
  extern __shared__ uint32_t prefix[];  // num_requests + 1
  __shared__ uint32_t of_warps[kCopyThreads / 32];
  ptx::wait_for_preceding_kernel();
  copy_missing_rows(p, prefix, of_warps);
}

template <bool kToPool>
__global__ void __launch_bounds__(kCopyThreads) copy_added(const __grid_constant__ CopyParams p) {
  ptx::wait_for_preceding_kernel();
  copy_added_rows<kToPool>(p);
}

}  // namespace jaxkv::sparse
