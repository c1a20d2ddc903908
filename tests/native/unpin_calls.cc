// Release of pinned memory (cuda/cache/pinned_memory.cu) with a runtime stub: the calls, with the
// current device, and the devices and the last error afterwards.
//
// The argument is the number of the call that fails, from 1 (0: none).
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "cache/pinned_memory.cu"

namespace {

int calls = 0, failing = 0, current = 5;
cudaError_t last_error = cudaSuccess;

cudaError_t call(const char* name) {
  std::printf("%s-%d ", name, current);
  return last_error = ++calls == failing ? cudaErrorUnknown : cudaSuccess;
}

}  // namespace

extern "C" {
cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  current = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return call("synchronize"); }
cudaError_t cudaHostUnregister(void*) { return call("unregister"); }
cudaError_t cudaHostRegister(void*, size_t, unsigned) { return call("register"); }
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorString(cudaError_t) { return "unknown error"; }
}

int main(int, char** arguments) {
  failing = std::atoi(arguments[1]);
  const auto error = jaxkv::cache::unpin(&calls, {2, 3});
  std::printf("\n%s\n%d %d\n", error.c_str(), current, last_error);
}
