// Host calls for a CUDA device (cuda/common/device.cu) with a stub of the runtime and the driver:
// the current context and the last error afterwards.
//
// Arguments: the number of the call that fails, from 1 (0: none), and the context of the thread (0:
// none). Device d has context 10 + d. Prints the calls on one line, then the message of the
// exception ("" for none), the current context and the last error.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "common/device.cu"

namespace {

int calls = 0, failing = 0;
uintptr_t current = 0, last_event = 0;
cudaError_t last_error = cudaSuccess;

cudaError_t call(const std::string& name) {
  std::printf("%s ", name.c_str());
  return last_error = ++calls == failing ? cudaErrorUnknown : cudaSuccess;
}

std::string number_of(const void* handle) {
  return std::to_string(reinterpret_cast<uintptr_t>(handle));
}

CUresult get_current(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(current);
  return CUDA_SUCCESS;
}

CUresult set_current(CUcontext context) {
  current = reinterpret_cast<uintptr_t>(context);
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned int,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *found = std::strcmp(name, "cuCtxGetCurrent") == 0 ? reinterpret_cast<void*>(get_current)
                                                     : reinterpret_cast<void*>(set_current);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  const cudaError_t status = call("device-" + std::to_string(device));
  if (status == cudaSuccess) current = 10 + device;
  return status;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  const cudaError_t status = call("create");
  if (status == cudaSuccess) *event = reinterpret_cast<cudaEvent_t>(++last_event);
  return status;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return call("record-" + number_of(event) + "-on-" + number_of(stream));
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return call("wait-" + number_of(event)); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return call("destroy-" + number_of(event)); }
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorUnknown"; }
const char* cudaGetErrorString(cudaError_t) { return "unknown error"; }
}

int main(int, char** arguments) {
  failing = std::atoi(arguments[1]);
  current = std::atoi(arguments[2]);
  auto stream = [](uintptr_t number) { return reinterpret_cast<CUstream_st*>(number); };
  jaxkv::set_program_stream(2, stream(6));
  jaxkv::set_program_stream(2, stream(7));  // of a later client of XLA
  jaxkv::set_program_stream(3, stream(8));
  jaxkv::add_own_stream(2, stream(9));
  std::string message;
  try {
    jaxkv::synchronize_device(2);
  } catch (const std::runtime_error& error) {
    message = error.what();
  }
  std::printf("\n%s\n%llu %d\n", message.c_str(), static_cast<unsigned long long>(current),
              last_error);
}
