// Host calls about a CUDA device, outside any step.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace jaxkv {

// Both throw std::runtime_error with CUDA's own message.
void synchronize_device(int ordinal);
std::string pci_address(int ordinal);

// How many copies each lane of each device was given, always in the same order; and whether all
// that such a list counts have ended.
std::vector<uint64_t> started_copies();
bool copies_ended(const std::vector<uint64_t>& started);

}  // namespace jaxkv
