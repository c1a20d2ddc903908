// Host calls for a CUDA device (cuda/common/device.cu) with a runtime stub: the current device and
// the last error afterwards.
//
// The argument is the number of the call that fails, from 1 (0: none). Prints the calls on one
// line, then the message of the exception ("" for none), the current device and the last error.
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <utility>

#include "common/device.cu"

namespace {

int calls = 0, failing = 0, current = 5;
cudaError_t last_error = cudaSuccess;

cudaError_t call(const char* name) {
  std::printf("%s ", name);
  return last_error = ++calls == failing ? cudaErrorUnknown : cudaSuccess;
}

}  // namespace

extern "C" {
cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return call("get");
}
cudaError_t cudaSetDevice(int device) {
  const cudaError_t status = call("set");
  if (status == cudaSuccess) current = device;
  return status;
}
cudaError_t cudaDeviceSynchronize() { return call("synchronize"); }
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorUnknown"; }
const char* cudaGetErrorString(cudaError_t) { return "unknown error"; }
}

int main(int, char** arguments) {
  failing = std::atoi(arguments[1]);
  std::string message;
  try {
    jaxkv::synchronize_device(2);
  } catch (const std::runtime_error& error) {
    message = error.what();
  }
  std::printf("\n%s\n%d %d\n", message.c_str(), current, last_error);
}
