// A stub of the CUDA runtime that prints the calls on streams and events, of which one can fail.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <utility>

#include "kernel_registration.h"

namespace {

int calls = 0, failing = 0;  // the number of the call that fails, from 1
bool recorded = false;       // set after creation, whose calls are not
const char* indent = "";
cudaError_t last_error = cudaSuccess;
uintptr_t last_event = 0, last_stream = 0;

// Numbers in order of creation, from 1; XLA's stream is 0.
uintptr_t number_of(cudaStream_t stream) { return reinterpret_cast<uintptr_t>(stream); }
uintptr_t number_of(cudaEvent_t event) { return reinterpret_cast<uintptr_t>(event); }

template <class... Parts>
cudaError_t call(const char* format, Parts... parts) {
  if (!recorded) return cudaSuccess;
  std::printf("%s", indent);
  std::printf(format, parts...);
  std::printf("\n");
  return ++calls == failing ? last_error = cudaErrorUnknown : cudaSuccess;
}

// By the program.
const char* name_of(cudaStream_t stream);
const char* name_of(cudaEvent_t event);
const char* name_of_launch(dim3 block);

}  // namespace

extern "C" {
cudaError_t cudaDeviceGetStreamPriorityRange(int*, int*) { return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int, int) {
  *stream = reinterpret_cast<cudaStream_t>(++last_stream);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  *event = reinterpret_cast<cudaEvent_t>(++last_event);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return call("%s records %s", name_of(stream), name_of(event));
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  return call("%s waits for %s", name_of(stream), name_of(event));
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheRuntime"; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the runtime"; }

// Of a launch, which does nothing.
unsigned int __cudaPushCallConfiguration(dim3, dim3 block, size_t, CUstream_st* stream) {
  call("%s %s", name_of(stream), name_of_launch(block));
  return 1;
}
}
