// Copies of the rows that a look-up has listed: from the pool to the hot buffer, or new rows to
// either of them.
//
// The words of all rows are one sequence, of which each warp takes contiguous parts: the rate does
// not depend on the size of a row, nor on how the missing rows are spread over the requests.
#pragma once

#include "common/ptx.cuh"
#include "sparse/rows.h"

namespace jaxkv::sparse {

inline constexpr uint32_t kCopyThreads = 512;
inline constexpr uint32_t kWordsInFlight = 8;  // per thread
inline constexpr uint32_t kTileWords = 32 * kWordsInFlight;

struct CopyParams {
  RowAddresses addresses;
  const RowMove* moves;
  const int32_t* counts;  // null for an append
  uint32_t num_requests, num_ids, slots, row_words;
};

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

inline __device__ uint32_t first_tile() {
  return (blockIdx.x * blockDim.x + threadIdx.x) / 32 * kTileWords;
}
inline __device__ uint32_t tile_stride() { return gridDim.x * blockDim.x / 32 * kTileWords; }

inline __device__ void copy_missing_rows(const CopyParams& p, uint32_t* prefix,
                                         uint32_t* of_warps) {
  sum_counts(p, prefix, of_warps);
  const uint32_t words = prefix[p.num_requests] * p.row_words, lane = threadIdx.x % 32;
  for (uint32_t tile = first_tile(); tile < words; tile += tile_stride()) {
    uint32_t request = request_of(prefix, p.num_requests, tile / p.row_words);
    uint4 loaded[kWordsInFlight];
    uint4* to[kWordsInFlight];
#pragma unroll
    for (uint32_t u = 0; u < kWordsInFlight; ++u) {
      const uint32_t word = tile + u * 32 + lane;
      to[u] = nullptr;
      if (word >= words) continue;
      const uint32_t move = word / p.row_words, offset = word - move * p.row_words;
      while (move >= prefix[request + 1]) ++request;
      const auto [token, slot] = p.moves[int64_t{request} * p.num_ids + move - prefix[request]];
      const auto row = int64_t{request} * p.slots + slot;
      to[u] = reinterpret_cast<uint4*>(p.addresses.of_slot(row)) + offset;
      loaded[u] = __ldcs(reinterpret_cast<const uint4*>(p.addresses.of_token(token)) + offset);
    }
#pragma unroll
    for (uint32_t u = 0; u < kWordsInFlight; ++u) {
      if (to[u]) *to[u] = loaded[u];
    }
  }
}

template <bool kToPool>
__device__ void copy_added_rows(const CopyParams& p) {
  const uint32_t words = p.num_requests * p.num_ids * p.row_words;
  for (uint32_t word = blockIdx.x * blockDim.x + threadIdx.x; word < words;
       word += gridDim.x * blockDim.x) {
    const uint32_t entry = word / p.row_words, offset = word - entry * p.row_words;
    const auto [token, slot] = p.moves[entry];
    if (slot == kNoRow) continue;
    const uint4 value = __ldcs(reinterpret_cast<const uint4*>(p.addresses.added) + word);
    const auto row = int64_t{entry / p.num_ids} * p.slots + slot;
    std::byte* to = kToPool ? p.addresses.of_token(token) : p.addresses.of_slot(row);
    reinterpret_cast<uint4*>(to)[offset] = value;
  }
}

__global__ void __launch_bounds__(kCopyThreads) copy_missing(const __grid_constant__ CopyParams p) {
  extern __shared__ uint32_t prefix[];  // num_requests + 1
  __shared__ uint32_t of_warps[kCopyThreads / 32];
  copy_missing_rows(p, prefix, of_warps);
}

template <bool kToPool>
__global__ void __launch_bounds__(kCopyThreads) copy_added(const __grid_constant__ CopyParams p) {
  copy_added_rows<kToPool>(p);
}

}  // namespace jaxkv::sparse
