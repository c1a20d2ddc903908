// Page-locking of host memory for CUDA.
#include <cuda_runtime.h>

#include "cache/pinned_memory.h"

namespace jaxkv::cache {
namespace {

std::string error_of(const char* call, cudaError_t status) {
  if (status == cudaSuccess) return "";
  (void)cudaGetLastError();
  return std::string(call) + " failed: " + cudaGetErrorString(status);
}

// Runs `work` with `device` as the current device of this thread.
template <typename Work>
std::string on_device(int device, Work work) {
  int before = 0;
  if (auto error = error_of("cudaGetDevice", cudaGetDevice(&before)); !error.empty()) return error;
  if (auto error = error_of("cudaSetDevice", cudaSetDevice(device)); !error.empty()) return error;
  std::string error = work();
  if (cudaSetDevice(before) != cudaSuccess) (void)cudaGetLastError();
  return error;
}

}  // namespace

std::string pin(void* data, size_t num_bytes, int device) {
  return on_device(device, [=] {
    return error_of("cudaHostRegister",
                    cudaHostRegister(data, num_bytes, cudaHostRegisterPortable));
  });
}

std::string unpin(void* data, const std::vector<int>& devices) {
  for (const int device : devices) {
    auto error = on_device(
        device, [] { return error_of("cudaDeviceSynchronize", cudaDeviceSynchronize()); });
    if (!error.empty()) return error;
  }
  return on_device(devices.front(),
                   [=] { return error_of("cudaHostUnregister", cudaHostUnregister(data)); });
}

}  // namespace jaxkv::cache
