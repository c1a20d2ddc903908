// Ordering of an asynchronous copy between XLA's stream and the copy stream, with a runtime stub
// that records the calls.
//
// Arguments: the number of the call that fails, from 1 (0: none), and whether XLA's stream must
// wait for the copy. Prints one line per call, then the error, the number of copies started, and
// the runtime's last error after that and after a query of the copy, which is not complete.
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "transfer/async_copy.h"

namespace {

int calls = 0, failing = 0;
bool started = false;  // set after creation, whose calls are not recorded
cudaError_t last_error = cudaSuccess;
uintptr_t last_event = 0;
const auto xla_stream = reinterpret_cast<cudaStream_t>(1);
const auto copy_stream_handle = reinterpret_cast<cudaStream_t>(2);

const char* name_of(cudaStream_t stream) {
  return stream == xla_stream ? "xla" : stream == copy_stream_handle ? "copy" : "another";
}

// Events are numbered in order of creation: `xla_work_` is the first.
template <class... Parts>
cudaError_t call(const char* format, Parts... parts) {
  if (!started) return cudaSuccess;
  std::printf(format, parts...);
  std::printf("\n");
  return ++calls == failing ? last_error = cudaErrorUnknown : cudaSuccess;
}

int number_of(cudaEvent_t event) { return static_cast<int>(reinterpret_cast<uintptr_t>(event)); }

}  // namespace

extern "C" {
cudaError_t cudaDeviceGetStreamPriorityRange(int*, int*) { return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int, int) {
  *stream = copy_stream_handle;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  *event = reinterpret_cast<cudaEvent_t>(++last_event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return call("%s records %d", name_of(stream), number_of(event));
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  return call("%s waits for %d", name_of(stream), number_of(event));
}
cudaError_t cudaEventQuery(cudaEvent_t) { return last_error = cudaErrorNotReady; }
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheRuntime"; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the runtime"; }

// Registration of kernels before main, and launches, which do nothing.
void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
unsigned int __cudaPushCallConfiguration(dim3, dim3, size_t, CUstream_st* stream) {
  call("%s gets the ticket", name_of(stream));
  return 1;
}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*,
                            void*, int*) {}
}

int main(int, char** arguments) {
  using namespace jaxkv;
  using namespace jaxkv::transfer;
  failing = std::atoi(arguments[1]);
  const bool joined = std::atoi(arguments[2]);
  CopyStream copy_stream;
  uint32_t word = 0;
  if (copy_stream.create(0, &word).failure()) return 1;
  started = true;
  auto enqueue = [](const CopyStream& on, uint32_t first) {
    const cudaError_t status = call("%s copies from %u", name_of(on.stream()), first);
    (void)cudaGetLastError();
    return status == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal("no copy");
  };
  const auto error =
      copy_stream.start(xla_stream, {nullptr, {}, {&word}, false}, 3, joined, enqueue);
  std::printf("%s\n%llu\n%d", error.message().c_str(),
              static_cast<unsigned long long>(copy_stream.started()), last_error);
  const bool ended = copy_stream.ended(1);
  std::printf(" %d\n", ended || last_error != cudaSuccess);
}
