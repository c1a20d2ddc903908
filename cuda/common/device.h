// Host calls for a CUDA device, outside of any step.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace jaxkv {

// Both throw std::runtime_error with CUDA's error message.
void synchronize_device(int ordinal);
std::string pci_address(int ordinal);

}  // namespace jaxkv
