// Copies beside the step, as the host asks for them: no CUDA headers.
#pragma once

#include <cstdint>
#include <vector>

namespace jaxkv::transfer {

// How many copies each lane of each device was given, always in the same order; and whether all
// that such a list counts have ended.
std::vector<uint64_t> started_copies();
bool copies_ended(const std::vector<uint64_t>& started);

}  // namespace jaxkv::transfer
