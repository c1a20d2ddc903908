// Cleanup of symmetric memory (cuda/collectives/symmetric_memory.cu) with a runtime stub: the calls
// that unmap and free the memory of two devices, of which each has mapped that of two others.
//
// The first argument is the device that fails (-1: none), the second whether it can still be made
// current.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "collectives/symmetric_memory.cc"
#include "collectives/symmetric_memory.cu"

namespace {

int failing = -1, current = 5;
bool selectable = true, cleaning = false;

void record(const char* name) {
  if (cleaning) std::printf("%s-%d ", name, current);
}

cudaError_t allocate(void** memory, size_t bytes) {
  *memory = std::calloc(1, bytes);
  return cudaSuccess;
}

cudaError_t release(const char* name, void* memory) {
  record(name);
  std::free(memory);
  return cudaSuccess;
}

}  // namespace

namespace jaxkv {

// Never nested here.
DeviceGuard::DeviceGuard(int ordinal) {
  if (ordinal == failing && !selectable) throw std::runtime_error("not selectable");
  current = ordinal;
}
DeviceGuard::~DeviceGuard() { current = 5; }

void synchronize_device(int ordinal) {
  const DeviceGuard guard(ordinal);
  record("synchronize");
  if (ordinal == failing) throw std::runtime_error("failed");
}

}  // namespace jaxkv

extern "C" {
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorUnknown"; }
const char* cudaGetErrorString(cudaError_t) { return "unknown error"; }
cudaError_t cudaDeviceCanAccessPeer(int* possible, int, int) {
  *possible = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned int) { return cudaSuccess; }
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned int) {
  return allocate(memory, bytes);
}
cudaError_t cudaMalloc(void** memory, size_t bytes) { return allocate(memory, bytes); }
cudaError_t cudaFree(void* memory) { return release("free", memory); }
cudaError_t cudaFreeHost(void* memory) { return release("free_host", memory); }
cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t*, unsigned int) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void*) {
  std::memset(handle, 0, sizeof *handle);
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t, unsigned int) {
  static char peer;
  *memory = &peer;
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void*) {
  record("close");
  return cudaSuccess;
}
}

int main(int, char** arguments) {
  auto communicator =
      jaxkv::collectives::make_cuda_communicator({4, 8, 8, 8}, {{0, 1, -1, -1}}, 1000);
  auto handles = communicator->handles();
  for (const size_t peer : {2, 3}) handles[0][peer].resize(sizeof(cudaIpcMemHandle_t));
  communicator->map(handles);
  failing = std::atoi(arguments[1]);
  selectable = std::atoi(arguments[2]);
  cleaning = true;
  communicator.reset();
  std::printf("\n%d\n", current);
}
