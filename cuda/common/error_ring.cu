#include <array>
#include <atomic>
#include <mutex>
#include <string>

#include "common/cuda_check.h"
#include "common/error_ring.cuh"

namespace jaxkv {
namespace {

std::array<std::atomic<ErrorRings*>, kMaxDevices> all_rings;

}  // namespace

xla::ffi::Error prepare_rings(int32_t device) {
  if (device < 0 || device >= kMaxDevices) {
    return xla::ffi::Error::Internal("jaxkv: device ordinal " + std::to_string(device) +
                                     " is outside [0, " + std::to_string(kMaxDevices) + ")");
  }
  if (all_rings[device].load()) return xla::ffi::Error::Success();
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (all_rings[device].load()) return xla::ffi::Error::Success();
  // Mapped host memory: written only when a fault is found, read by the host without a sync.
  ErrorRings* rings = nullptr;
  JAXKV_RETURN_IF_CUDA_ERROR(
      cudaHostAlloc(&rings, sizeof *rings, cudaHostAllocPortable | cudaHostAllocMapped));
  *rings = {};
  register_rings(rings, device);
  all_rings[device].store(rings);
  return xla::ffi::Error::Success();
}

ErrorRings* device_rings(int32_t device) { return all_rings[device].load(); }

}  // namespace jaxkv
