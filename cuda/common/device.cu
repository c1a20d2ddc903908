#include <cuda_runtime.h>

#include <stdexcept>

#include "common/device.h"

namespace jaxkv {
namespace {

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  throw std::runtime_error(std::string("jaxkv: ") + call +
                           " failed: " + cudaGetErrorString(status));
}

}  // namespace

void synchronize_device(int ordinal) {
  int before = 0;
  check(cudaGetDevice(&before), "cudaGetDevice");
  check(cudaSetDevice(ordinal), "cudaSetDevice");
  const cudaError_t status = cudaDeviceSynchronize();
  check(cudaSetDevice(before), "cudaSetDevice");
  check(status, "cudaDeviceSynchronize");
}

std::string pci_address(int ordinal) {
  char address[32];
  check(cudaDeviceGetPCIBusId(address, sizeof address, ordinal), "cudaDeviceGetPCIBusId");
  return address;
}

}  // namespace jaxkv
