// Counters of asynchronous copies for the host; free of CUDA headers.
#pragma once

#include <cstdint>
#include <vector>

namespace jaxkv::transfer {

// The number of copies enqueued entirely on each copy stream of each device, in a fixed order; and
// whether all copies counted in such a list have completed. A copy of a program whose handle leaves
// it is among them once the program has been enqueued.
std::vector<uint64_t> started_copies();
bool copies_ended(const std::vector<uint64_t>& started);

}  // namespace jaxkv::transfer
