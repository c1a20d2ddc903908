#include "common/cuda_check.h"
#include "common/device.h"

namespace jaxkv {
namespace {

std::string device_text(int ordinal) { return "CUDA device " + std::to_string(ordinal); }

}  // namespace

DeviceGuard::DeviceGuard(int ordinal) {
  JAXKV_CHECK_CUDA(cudaGetDevice(&previous_));
  JAXKV_CHECK_CUDA(cudaSetDevice(ordinal), device_text(ordinal));
}

DeviceGuard::~DeviceGuard() {
  if (cudaSetDevice(previous_) != cudaSuccess) (void)cudaGetLastError();
}

void synchronize_device(int ordinal) {
  const DeviceGuard current(ordinal);
  JAXKV_CHECK_CUDA(cudaDeviceSynchronize(), device_text(ordinal));
}

std::string pci_address(int ordinal) {
  char address[32];
  JAXKV_CHECK_CUDA(cudaDeviceGetPCIBusId(address, sizeof address, ordinal), device_text(ordinal));
  return address;
}

}  // namespace jaxkv
