// Entries of id lists, the records of invalid ones, and the check of a list that one warp can hold.
#pragma once

#include "common/error_ring.cuh"
#include "transfer/block_copy.h"

namespace jaxkv::transfer {

struct IdParams {
  const int32_t* sources;
  const int32_t* destinations;
  uint32_t num_ids;
  int32_t num_sources, num_destinations;
  Operation operation;
  ErrorRings* errors;  // null where another launch records them
};

inline IdParams id_params(const IdLists& ids, ErrorRings* errors) {
  return {ids.sources.ids(),
          ids.destinations.ids(),
          static_cast<uint32_t>(ids.sources.size()),
          ids.num_sources,
          ids.num_destinations,
          ids.operation,
          errors};
}

// Placeholder of an entry that is not copied; reading block 0 is harmless.
inline constexpr BlockPair kNoPair{0, -1};

inline __device__ bool is_in_range(const IdParams& ids, BlockPair pair) {
  // Unsigned comparison, so that negative ids (padding) are out of range as well.
  return static_cast<uint32_t>(pair.source) < static_cast<uint32_t>(ids.num_sources) &&
         static_cast<uint32_t>(pair.destination) < static_cast<uint32_t>(ids.num_destinations);
}

// Records an entry out of range, unless it is padding.
inline __device__ void record_range_error(const IdParams& ids, uint32_t i, BlockPair pair) {
  const auto [source, destination] = pair;
  if (!ids.errors || source < 0 || destination < 0) return;
  auto record = [&](ErrorCode fault, int32_t id, int32_t limit) {
    record_error(ids.errors, {fault, ids.operation}, static_cast<int32_t>(i), id, limit);
  };
  if (source >= ids.num_sources) {
    record(ErrorCode::kSourceOutOfRange, source, ids.num_sources);
  } else if (destination >= ids.num_destinations) {
    record(ErrorCode::kDestinationOutOfRange, destination, ids.num_destinations);
  }
}

inline __device__ void record_duplicate(const IdParams& ids, uint32_t i, int32_t destination) {
  if (!ids.errors) return;
  record_error(ids.errors, {ErrorCode::kDuplicate, ids.operation}, static_cast<int32_t>(i),
               destination, ids.num_destinations);
}

// A list of up to kFewIds ids is checked by one warp, which holds an entry in each lane: no hash
// set, and one barrier.
inline constexpr uint32_t kFewIds = 32;

// Lists all pairs of few ids in `pairs`: the entries in range, kNoPair for a duplicate. Records the
// invalid entries if `record`. Returns the number of pairs. All threads of the block must call it.
inline __device__ uint32_t list_few(const IdParams& ids, bool record, BlockPair* pairs) {
  __shared__ uint32_t num_pairs;
  if (threadIdx.x < kFewIds) {
    const uint32_t lane = threadIdx.x;
    BlockPair entry = kNoPair;
    if (lane < ids.num_ids) entry = {__ldg(ids.sources + lane), __ldg(ids.destinations + lane)};
    const bool valid = is_in_range(ids, entry);
    const uint32_t all_valid = __ballot_sync(~0u, valid);
    // A valid destination is below 2^31 - 1; other lanes get keys of their own above.
    const uint32_t key = valid ? static_cast<uint32_t>(entry.destination) : ~lane;
    const bool duplicate = __popc(__match_any_sync(~0u, key)) > 1;
    if (valid) pairs[__popc(all_valid & ((1u << lane) - 1))] = duplicate ? kNoPair : entry;
    if (lane == 0) num_pairs = static_cast<uint32_t>(__popc(all_valid));
    if (record) record_range_error(ids, lane, entry);
    if (record && duplicate) record_duplicate(ids, lane, entry.destination);
  }
  __syncthreads();
  return num_pairs;
}

}  // namespace jaxkv::transfer
