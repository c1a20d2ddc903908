// A baseline of bench/sparse/fetch.py: a kernel after the published design of SGLang's HiSparse
// (jit_kernel/csrc, hisparse_transfer.cuh), for rows of one buffer (MLA).
//
// One thread block for each request: the ids go to a hash table in shared memory, every slot is
// looked up there in the order of an LRU list, the list is partitioned into missed and hit slots
// and written back, and each warp then copies one missing row at a time, in words of 8 bytes.
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kIds = 2048, kTable = 2 * kIds, kMaxSlots = 4096;
constexpr int kNone = -1;

struct Params {
  const int32_t* ids;        // [batch, kIds]
  const int32_t* host_rows;  // [batch, max_length]: row of the pool of each position
  const std::byte* pool;
  std::byte* hot;      // [batch, slots]
  int32_t* positions;  // [batch, slots]
  int16_t* order;      // [batch, slots], least recently used first
  int32_t* rows;       // [batch, kIds]
  int64_t max_length;
  int32_t slots, row_bytes;
};

// The number of threads before this one with a set flag, and of all with one.
__device__ int2 rank_of(bool flag, int* of_warps) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned mask = __ballot_sync(~0u, flag);
  __syncthreads();  // of_warps of the previous call has been read
  if (lane == 0) of_warps[warp] = __popc(mask);
  __syncthreads();
  const int count = of_warps[lane];
  const int before = __reduce_add_sync(~0u, lane < warp ? count : 0);
  return {before + __popc(mask & ((1u << lane) - 1)),
          static_cast<int>(__reduce_add_sync(~0u, count))};
}

__device__ int home(int32_t id) { return static_cast<uint32_t>(id) * 2654435761u % kTable; }

__device__ void copy_row(const std::byte* from, std::byte* to, int bytes) {
  for (int i = threadIdx.x % 32; i < bytes / 8; i += 32) {
    uint64_t word;
    asm volatile("ld.global.nc.b64 %0, [%1];" : "=l"(word) : "l"(from + 8 * i) : "memory");
    asm volatile("st.global.cg.b64 [%0], %1;" ::"l"(to + 8 * i), "l"(word) : "memory");
  }
}

__global__ void __launch_bounds__(kThreads) fetch(const __grid_constant__ Params p) {
  __shared__ int32_t keys[kTable], missing[kIds];
  __shared__ int16_t entries[kTable], evictable[kMaxSlots];
  __shared__ int of_warps[kWarps];
  const int64_t request = blockIdx.x;
  const int32_t* ids = p.ids + request * kIds;
  int32_t* rows = p.rows + request * kIds;
  int32_t* positions = p.positions + request * p.slots;
  int16_t* order = p.order + request * p.slots;
  for (int i = threadIdx.x; i < kTable; i += kThreads) keys[i] = kNone;
  __syncthreads();
  for (int i = threadIdx.x; i < kIds; i += kThreads) {
    int place = home(ids[i]);
    while (true) {
      const int32_t old = atomicCAS(&keys[place], kNone, ids[i]);
      if (old == kNone || old == ids[i]) break;
      place = (place + 1) % kTable;
    }
    entries[place] = i;
    missing[i] = ids[i];
  }
  __syncthreads();
  int hits = 0, evictables = 0;
  int16_t slots_of_hits[kMaxSlots / kThreads], ranks_of_hits[kMaxSlots / kThreads];
  for (int round = 0; round < kMaxSlots / kThreads; ++round) {
    const int i = round * kThreads + threadIdx.x;
    const int slot = i < p.slots ? order[i] : kNone;
    const int32_t position = slot >= 0 ? positions[slot] : kNone;
    int entry = kNone;
    for (int place = home(position); position >= 0 && keys[place] != kNone;
         place = (place + 1) % kTable) {
      if (keys[place] != position) continue;
      entry = entries[place];
      break;
    }
    const bool hit = entry >= 0;
    if (hit) {
      missing[entry] = kNone;
      rows[entry] = static_cast<int32_t>(request * p.slots + slot);
    }
    const int2 hit_rank = rank_of(hit, of_warps);
    const int2 evictable_rank = rank_of(slot >= 0 && !hit, of_warps);
    slots_of_hits[round] = slot;
    ranks_of_hits[round] = hit ? hits + hit_rank.x : kNone;
    if (slot >= 0 && !hit) evictable[evictables + evictable_rank.x] = slot;
    hits += hit_rank.y;
    evictables += evictable_rank.y;
  }
  __syncthreads();
  int misses = 0;
  int32_t new_ids[kIds / kThreads];
  int new_ranks[kIds / kThreads];
  for (int round = 0; round < kIds / kThreads; ++round) {
    const int32_t id = missing[round * kThreads + threadIdx.x];
    const int2 rank = rank_of(id >= 0, of_warps);
    new_ids[round] = id;
    new_ranks[round] = misses + rank.x;
    misses += rank.y;
  }
  __syncthreads();
  for (int round = 0; round < kIds / kThreads; ++round) {
    if (new_ids[round] < 0) continue;
    const int16_t slot = evictable[new_ranks[round]];
    missing[new_ranks[round]] = new_ids[round];
    positions[slot] = new_ids[round];
    rows[round * kThreads + threadIdx.x] = static_cast<int32_t>(request * p.slots + slot);
  }
  for (int round = 0; round < kMaxSlots / kThreads; ++round) {
    if (ranks_of_hits[round] >= 0) {
      order[evictables + ranks_of_hits[round]] = slots_of_hits[round];
    }
    const int i = round * kThreads + threadIdx.x;  // rows of this call to the end of the evictables
    if (i < evictables) order[i] = evictable[(i + misses) % evictables];
  }
  __syncthreads();
  for (int miss = threadIdx.x / 32; miss < misses; miss += kWarps) {
    const int64_t from = p.host_rows[request * p.max_length + missing[miss]];
    copy_row(p.pool + from * p.row_bytes,
             p.hot + (request * p.slots + evictable[miss]) * p.row_bytes, p.row_bytes);
  }
}

ffi::Error run(cudaStream_t stream, ffi::Buffer<ffi::S32> ids, ffi::AnyBuffer host_rows,
               ffi::AnyBuffer pool, ffi::AnyBuffer, ffi::AnyBuffer, ffi::AnyBuffer,
               ffi::Result<ffi::Buffer<ffi::S32>> rows, ffi::Result<ffi::AnyBuffer> hot,
               ffi::Result<ffi::Buffer<ffi::S32>> positions,
               ffi::Result<ffi::Buffer<ffi::S16>> order, int64_t max_length, int64_t row_bytes) {
  const auto batch = static_cast<int>(ids.dimensions()[0]);
  const auto slots = static_cast<int32_t>(order->dimensions()[1]);
  if (ids.dimensions()[1] != kIds || slots > kMaxSlots) {
    return ffi::Error::InvalidArgument("published design: 2,048 ids, at most 4,096 slots");
  }
  const Params params{ids.typed_data(),
                      static_cast<const int32_t*>(host_rows.untyped_data()),
                      static_cast<const std::byte*>(pool.untyped_data()),
                      static_cast<std::byte*>(hot->untyped_data()),
                      positions->typed_data(),
                      order->typed_data(),
                      rows->typed_data(),
                      max_length,
                      slots,
                      static_cast<int32_t>(row_bytes)};
  fetch<<<batch, kThreads, 0, stream>>>(params);
  const auto status = cudaGetLastError();
  return status == cudaSuccess ? ffi::Error::Success()
                               : ffi::Error::Internal(cudaGetErrorString(status));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(PublishedFetch, run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S16>>()
                                  .Attr<int64_t>("max_length")
                                  .Attr<int64_t>("row_bytes"),
                              {ffi::Traits::kCmdBufferCompatible});
