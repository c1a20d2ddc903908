// Number of thread blocks of an all-reduce. Block b of a rank waits for block b of its peers, so
// all blocks of a call must be resident at once on every device, also while an asynchronous copy
// occupies its SMs.
#pragma once

#include <algorithm>

#include "collectives/all_reduce.h"

namespace jaxkv::collectives {

inline constexpr int kThreads = 256;        // per block
inline constexpr int kSpareProcessors = 4;  // SMs that tuning tables assign to an asynchronous copy

// Blocks of a kernel that are resident together on a device, given those that each SM holds. At
// least one, also on a GPU without SMs to spare.
constexpr int32_t resident_limit(int blocks_per_processor, int processors) {
  const int64_t blocks = int64_t{blocks_per_processor} * (processors - kSpareProcessors);
  return static_cast<int32_t>(std::clamp<int64_t>(blocks, 1, kMaxBlocks));
}

// Equal on all ranks, as are the arguments.
inline int blocks_for(const Message& message, const Geometry& geometry, const BlockLimits& limits) {
  const Route route = route_of(message, geometry);
  uint64_t share = message.bytes / sizeof(Word);  // words that a rank reduces
  if (message.algorithm == Algorithm::kTwoShot || message.algorithm == Algorithm::kMultimem) {
    share /= geometry.world_size;
  }
  uint64_t max_blocks = limits.at(static_cast<size_t>(route));
  uint64_t words = kThreads;  // per block
  if (route == Route::kTiled) {
    max_blocks = std::min<uint64_t>(max_blocks, kTileBlocks);
    words = geometry.tile_words;
  }
  return static_cast<int>(std::clamp<uint64_t>((share + words - 1) / words, 1, max_blocks));
}

}  // namespace jaxkv::collectives
