// Release of pinned memory (cuda/cache/pinned_memory.cu) with a runtime stub: the calls, and the
// last error afterwards.
//
// The argument is the number of the call that fails, from 1 (0: none).
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>

#include "cache/pinned_memory.cu"

namespace {

int calls = 0, failing = 0, current = 5;
cudaError_t last_error = cudaSuccess;

bool fails(const char* name, int device) {
  std::printf("%s-%d ", name, device);
  return ++calls == failing;
}

}  // namespace

namespace jaxkv {

// Stubs for device.cu, which is not linked.
DeviceGuard::DeviceGuard(int ordinal) { current = ordinal; }
DeviceGuard::~DeviceGuard() { current = 5; }
void synchronize_device(int ordinal) {
  if (fails("synchronize", ordinal)) throw std::runtime_error("unknown error");
}

}  // namespace jaxkv

extern "C" {
cudaError_t cudaHostUnregister(void*) {
  return last_error = fails("unregister", current) ? cudaErrorUnknown : cudaSuccess;
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorUnknown"; }
const char* cudaGetErrorString(cudaError_t) { return "unknown error"; }
}

int main(int, char** arguments) {
  failing = std::atoi(arguments[1]);
  std::string message;
  try {
    jaxkv::cache::unpin(&calls, {2, 3});
  } catch (const std::runtime_error& error) {
    message = error.what();
  }
  std::printf("\n%s\n%d %d\n", message.c_str(), current, last_error);
}
