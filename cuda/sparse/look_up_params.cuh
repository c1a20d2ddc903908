// Parameters of a look-up, its shared memory, and how it reports invalid ids.
#pragma once

#include <algorithm>
#include <bit>

#include "common/error_ring.cuh"
#include "sparse/rows.h"

namespace jaxkv::sparse {

inline constexpr uint32_t kLookUpThreads = 1024;

// Upper bounds of the ids and slots of a thread, which are in registers. With the smaller bounds,
// which the usual sizes satisfy, a kernel has fewer instructions.
struct Large {
  static constexpr int kIds = kMaxIds / kLookUpThreads, kSlots = kMaxSlots / kLookUpThreads;
};
struct Small {
  static constexpr int kIds = 2048 / kLookUpThreads, kSlots = 4096 / kLookUpThreads;
};

// Buckets of the histogram of ages: one per age, one for all ages from kOldBucket on, one for free
// slots.
inline constexpr uint32_t kBuckets = 256, kFreeBucket = kBuckets - 1, kOldBucket = kBuckets - 2;

// Shared memory of a request, in the order of its parts.
struct LookUpSize {
  uint32_t slots, ids, table;
  int32_t ids_of_thread, slots_of_thread;

  LookUpSize(int32_t num_slots, int32_t num_ids, int32_t threads)
      : slots(num_slots),
        ids(num_ids),
        table(std::bit_ceil(2u * std::max(num_ids, 32))),
        ids_of_thread((num_ids + threads - 1) / threads),
        slots_of_thread((num_slots + threads - 1) / threads) {}
  uint32_t bytes() const { return 4 * kBuckets + 4 * slots + 4 * table + 2 * 2 * ids; }
  bool is_small() const { return ids_of_thread <= Small::kIds && slots_of_thread <= Small::kSlots; }
};

struct LookUpParams {
  RowBatch batch;
  LookUpSize size;
  ErrorRings* errors;
};

// Not inlined: a look-up executes each instruction once, so fetching instructions takes a part of
// its time.
__device__ __noinline__ void record_fault(ErrorRings* errors, Fault fault, int32_t position,
                                          int32_t id, int32_t limit) {
  record_error(errors, fault, position, id, limit);
}
__device__ __noinline__ void record_token_fault(const LookUpParams& p, int32_t request,
                                                int32_t position) {
  find_token(p.batch, request, position,
             [&p](ErrorCode code, int32_t place, int32_t id, int32_t limit) {
               record_error(p.errors, {code, p.batch.operation}, place, id, limit);
             });
}

}  // namespace jaxkv::sparse
