// Host calls about a CUDA device, outside any step.
#pragma once

#include <cstdint>
#include <string>

namespace jaxkv {

// Both throw std::runtime_error with CUDA's own message.
void synchronize_device(int ordinal);
std::string pci_address(int ordinal);

// Whether the last copy that was started with its ticket at `address` has ended, or there is none.
bool copy_ended(uintptr_t address);

}  // namespace jaxkv
