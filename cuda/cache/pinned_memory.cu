// Page-locking of host memory for CUDA.
#include <cuda_runtime.h>

#include <string>

#include "cache/pinned_memory.h"
#include "common/cuda_check.h"
#include "common/device.h"

namespace jaxkv::cache {

void pin(void* data, size_t num_bytes, int device) {
  const DeviceGuard current(device);
  JAXKV_CHECK_CUDA(cudaHostRegister(data, num_bytes, cudaHostRegisterPortable),
                   std::to_string(num_bytes) + " bytes of pinned host memory");
}

// cudaHostUnregister waits for all work of the device, too (measured on an H200), but blocks
// launches by other threads meanwhile.
void unpin(void* data, const std::vector<int>& devices) {
  for (const int device : devices) synchronize_device(device);
  const DeviceGuard current(devices.front());
  JAXKV_CHECK_CUDA(cudaHostUnregister(data));
}

}  // namespace jaxkv::cache
