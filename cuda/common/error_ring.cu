#include <array>
#include <atomic>
#include <mutex>
#include <string>

#include "common/cuda_check.h"
#include "common/error_ring.cuh"

namespace jaxkv {
namespace {

std::array<std::array<std::atomic<ErrorRings*>, kMaxScopes>, kMaxDevices> all_rings;

xla::ffi::Error allocate(int32_t device, Scope scope, std::atomic<ErrorRings*>& of_scope) {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (of_scope.load()) return xla::ffi::Error::Success();
  // Mapped host memory: written only when a fault is found, read by the host without a sync.
  ErrorRings* rings = nullptr;
  JAXKV_RETURN_IF_CUDA_ERROR(
      cudaHostAlloc(&rings, sizeof *rings, cudaHostAllocPortable | cudaHostAllocMapped));
  *rings = {};
  register_rings(rings, device, scope);
  of_scope.store(rings);
  return xla::ffi::Error::Success();
}

}  // namespace

xla::ffi::Error prepare_rings(int32_t device, Scope scope) {
  if (device < 0 || device >= kMaxDevices) {
    return xla::ffi::Error::Internal("jaxkv: device ordinal " + std::to_string(device) +
                                     " is outside [0, " + std::to_string(kMaxDevices) + ")");
  }
  auto& of_default = all_rings[device][0];
  if (!of_default.load()) {
    if (auto error = allocate(device, Scope::kDefault, of_default); error.failure()) return error;
  }
  auto& of_scope = all_rings[device][scope_index(scope)];
  return of_scope.load() ? xla::ffi::Error::Success() : allocate(device, scope, of_scope);
}

ErrorRings* device_rings(int32_t device, Scope scope) {
  const auto& of_device = all_rings[device];
  ErrorRings* rings = of_device[scope_index(scope)].load();
  return rings ? rings : of_device[0].load();
}

}  // namespace jaxkv
