// Counters of asynchronous copies for the host; free of CUDA headers.
#pragma once

#include <cstdint>
#include <vector>

namespace jaxkv::transfer {

// The number of copies started on each copy stream of each device, in a fixed order; and whether
// all copies counted in such a list have completed.
std::vector<uint64_t> started_copies();
bool copies_ended(const std::vector<uint64_t>& started);

}  // namespace jaxkv::transfer
