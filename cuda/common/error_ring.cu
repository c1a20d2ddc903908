#include <array>
#include <atomic>
#include <mutex>
#include <string>

#include "common/cuda_check.h"
#include "common/error_ring.cuh"

namespace jaxkv {
namespace {

std::array<std::atomic<ErrorRing*>, kMaxDevices> device_rings;

}  // namespace

xla::ffi::Error prepare_ring(int32_t device) {
  if (device < 0 || device >= kMaxDevices) {
    return xla::ffi::Error::Internal("jaxkv: device ordinal " + std::to_string(device) +
                                     " is outside [0, " + std::to_string(kMaxDevices) + ")");
  }
  if (device_rings[device].load()) return xla::ffi::Error::Success();
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (device_rings[device].load()) return xla::ffi::Error::Success();
  // Mapped host memory: written only when a fault is found, read by the host without a sync.
  ErrorRing* ring = nullptr;
  JAXKV_RETURN_IF_CUDA_ERROR(
      cudaHostAlloc(&ring, sizeof *ring, cudaHostAllocPortable | cudaHostAllocMapped));
  *ring = {};
  register_ring(ring);
  device_rings[device].store(ring);
  return xla::ffi::Error::Success();
}

ErrorRing* device_ring(int32_t device) { return device_rings[device].load(); }

}  // namespace jaxkv
