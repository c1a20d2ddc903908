// Host calls for a CUDA device, outside of any step. Free of CUDA headers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace jaxkv {

// Makes a device current for the calling thread, and restores the previous one at the end, also if
// a check throws.
class DeviceGuard {
 public:
  explicit DeviceGuard(int ordinal);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
};

// Both throw std::runtime_error with CUDA's error message.
void synchronize_device(int ordinal);
std::string pci_address(int ordinal);

}  // namespace jaxkv
