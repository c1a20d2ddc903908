// The check of the ids on the host, as a library for tests/transfer/test_id_check.py.
#include "cuda_on_host/threads.h"

#undef __shared__
#define __shared__ static  // of the one block that runs at a time

#include "transfer/id_check.cuh"

namespace {

using namespace jaxkv::transfer;

constexpr int kReads = 4;

Claim share_of(uint32_t num_pairs) {
  const uint32_t part = (num_pairs + gridDim.x - 1) / gridDim.x;
  return {{std::min(blockIdx.x * part, num_pairs), std::min((blockIdx.x + 1) * part, num_pairs)},
          false};
}

IdParams params_of(const int64_t* n, const int32_t* sources, const int32_t* destinations) {
  return {sources,
          destinations,
          static_cast<uint32_t>(n[4]),
          static_cast<int32_t>(n[5]),
          static_cast<int32_t>(n[6]),
          {},
          reinterpret_cast<jaxkv::ErrorRings*>(16)};
}

}  // namespace

// The check of few ids by one thread block; the arguments are those of `run`, `counts` is [1].
extern "C" int64_t run_few(const int64_t* n, const int32_t* sources, const int32_t* destinations,
                           int32_t record, BlockPair* pairs, int32_t* count) {
  const IdParams ids = params_of(n, sources, destinations);
  jaxkv::faults = 0;
  simulated::run_block(static_cast<uint32_t>(n[0]), n[1], [&] {
    BlockPair* const listed = pairs;
    const uint32_t num_pairs = list_few(ids, record, listed);
    if (num_pairs > 0 && listed[num_pairs - 1].source == -9) ++jaxkv::faults;  // before the barrier
    if (threadIdx.x == 0) *count = static_cast<int32_t>(num_pairs);
  });
  return jaxkv::faults;
}

// `numbers`: threads, descending, thread blocks, whether ids are copied to shared memory, ids,
// source blocks, destination blocks. `opened`, `pairs`: the pairs that a copy begins with, and
// those that it copies in the end, of all thread blocks: [n, 2] with n pairs of room per thread
// block. `counts`: pairs of each thread block, of both kinds. Returns the number of recorded
// errors.
extern "C" int64_t run(const int64_t* n, const int32_t* sources, const int32_t* destinations,
                       BlockPair* opened, BlockPair* pairs, int32_t* counts) {
  const auto threads = static_cast<uint32_t>(n[0]), num_ids = static_cast<uint32_t>(n[4]);
  gridDim.x = static_cast<uint32_t>(n[2]);
  const IdParams ids = params_of(n, sources, destinations);
  ShareSize size((num_ids + gridDim.x - 1) / gridDim.x);
  if (n[3]) size = size.with_copy(num_ids, UINT32_MAX);
  jaxkv::faults = 0;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
    const size_t room = size_t{blockIdx.x} * num_ids;
    std::vector<uint4> memory(size.bytes() / 16 + 1, {~7u, ~7u, ~7u, ~7u});
    auto* shared = reinterpret_cast<std::byte*>(memory.data());
    jaxkv::ptx::start_block(shared, threads);
    simulated::run_block(threads, n[1], [&] {
      Share<kReads> share(ids, size, shared);
      Span span = share_of(num_ids).pairs;
      share.list(span);
      if (threadIdx.x == 0) {
        std::copy_n(share.pairs(), span.size(), opened + room);
        counts[2 * blockIdx.x] = span.size();
      }
      if (!share.all_valid()) span = share.regroup(blockIdx.x == 0, share_of).pairs;
      if (threadIdx.x == 0) {
        std::copy_n(share.pairs(), span.size(), pairs + room);
        counts[2 * blockIdx.x + 1] = span.size();
      }
    });
  }
  return jaxkv::faults;
}

// Pairs [first, last) of a checked list, as a copy stages them; the arguments are those of `run`.
extern "C" void run_stage(const int64_t* n, const BlockPair* pairs, uint32_t first, uint32_t last,
                          BlockPair* staged) {
  const IdParams limits = params_of(n, nullptr, nullptr);
  simulated::run_block(static_cast<uint32_t>(n[0]), n[1],
                       [&] { stage(limits, pairs, {first, last}, staged); });
}
