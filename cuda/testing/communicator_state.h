// Test hooks: the state of a communicator between two calls. Compiled with JAXKV_TEST_HOOKS only.
#pragma once

#include "collectives/symmetric_memory.h"

namespace jaxkv::testing {

// Sets the ranks of this process to `epoch` barriers passed, and their peers to `ahead` barriers
// further, so that with ahead > 0 no wait blocks: a negative control of the waits.
inline void set_epoch(collectives::Communicator& communicator, uint64_t epoch, uint64_t ahead) {
  collectives::Header header{};
  header.progress.epoch = epoch;
  for (auto& of_block : header.signals.flags) {
    for (auto& flag : of_block) flag = epoch + ahead;
  }
  communicator.initialize(header, ahead ? 0 : collectives::kUnset);
}

// Maximum random delay of threads within a call.
inline void set_stall(collectives::Communicator& communicator, uint64_t nanoseconds) {
  communicator.for_each_local(
      [=](collectives::Communicator::Rank& rank) { rank.view.stall_ns = nanoseconds; });
}

}  // namespace jaxkv::testing
