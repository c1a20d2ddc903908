// Every CUDA call of the host code fails in turn, with a stub of the runtime that keeps its last
// error, as CUDA does. Whether the failure is an error of the operation or is handled by it,
// afterwards no error must be left for the next check, and the previous device must be current.
//
// Prints a line for each call that leaves something behind, and the number of calls.
#define JAXKV_CUDA 1
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <utility>

#include "cache/pinned_memory.cu"
#include "collectives/symmetric_memory.cc"
#include "collectives/symmetric_memory.cu"
#include "common/device.cu"

namespace {

int calls = 0, failing = 0, current = 5;
const char* failed = "";
cudaError_t last_error = cudaSuccess, failure = cudaErrorUnknown;

cudaError_t call(const char* name) {
  if (++calls != failing) return cudaSuccess;
  failed = name;
  return last_error = failure;
}

// The context of device d is the address 10 + d.
CUresult get_current(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(uintptr_t(10 + current));
  return CUDA_SUCCESS;
}
CUresult set_current(CUcontext context) {
  current = static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 10;
  return CUDA_SUCCESS;
}

// Handles are addresses of one byte, never dereferenced.
template <class Handle>
cudaError_t create(const char* name, Handle* handle) {
  static char byte;
  const cudaError_t status = call(name);
  if (status == cudaSuccess) *handle = reinterpret_cast<Handle>(&byte);
  return status;
}

cudaError_t allocate(const char* name, void** memory, size_t bytes) {
  const cudaError_t status = call(name);
  if (status == cudaSuccess) *memory = std::calloc(1, bytes);
  return status;
}

}  // namespace

extern "C" {
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheRuntime"; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the runtime"; }
cudaError_t cudaSetDevice(int device) {
  const cudaError_t status = call("cudaSetDevice");
  if (status == cudaSuccess) current = device;
  return status;
}
cudaError_t cudaDeviceGetPCIBusId(char* address, int, int) {
  *address = 0;
  return call("cudaDeviceGetPCIBusId");
}
cudaError_t cudaDeviceCanAccessPeer(int* possible, int, int) {
  *possible = 1;
  return call("cudaDeviceCanAccessPeer");
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned int) {
  return call("cudaDeviceEnablePeerAccess");
}
cudaError_t cudaHostRegister(void*, size_t, unsigned int) { return call("cudaHostRegister"); }
cudaError_t cudaHostUnregister(void*) { return call("cudaHostUnregister"); }
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned int) {
  return allocate("cudaHostAlloc", memory, bytes);
}
cudaError_t cudaMalloc(void** memory, size_t bytes) {
  return allocate("cudaMalloc", memory, bytes);
}
cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return call("cudaFree");
}
cudaError_t cudaFreeHost(void* memory) {
  std::free(memory);
  return call("cudaFreeHost");
}
cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t) {
  return call("cudaMemcpyAsync");
}
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return call("cudaMemsetAsync"); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  return create("cudaStreamCreateWithFlags", stream);
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return call("cudaStreamSynchronize"); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return call("cudaStreamDestroy"); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  return create("cudaEventCreateWithFlags", event);
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return call("cudaEventRecord"); }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return call("cudaEventSynchronize"); }
cudaError_t cudaEventDestroy(cudaEvent_t) { return call("cudaEventDestroy"); }
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void*) {
  std::memset(handle, 0, sizeof *handle);
  return call("cudaIpcGetMemHandle");
}
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t, unsigned int) {
  static char peer;
  *memory = &peer;
  return call("cudaIpcOpenMemHandle");
}
cudaError_t cudaIpcCloseMemHandle(void*) { return call("cudaIpcCloseMemHandle"); }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned int,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *found = nullptr;
  if (std::strcmp(name, "cuCtxGetCurrent") == 0) *found = reinterpret_cast<void*>(get_current);
  if (std::strcmp(name, "cuCtxSetCurrent") == 0) *found = reinterpret_cast<void*>(set_current);
  *result = *found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  if (*found) return cudaSuccess;  // looked up once only
  return call("cudaGetDriverEntryPointByVersion");
}
}

namespace jaxkv {
namespace {

using collectives::ByRank;
using collectives::Geometry;
using collectives::Handle;

void communicator_of_one_process() {
  collectives::make_cuda_communicator({2, 8, 8, 8}, {{0, 1}}, 1000);
}

void communicator_of_two_processes() {
  auto communicator = collectives::make_cuda_communicator({2, 8, 8, 8}, {{0, -1}}, 1000);
  ByRank<Handle> handles = communicator->handles();
  handles[0][1] = Handle(sizeof(cudaIpcMemHandle_t));
  communicator->map(handles);
  communicator->unmap();
}

void pinned_memory() {
  cache::pin(&calls, sizeof calls, 1);
  cache::unpin(&calls, {0, 1});
}

void device() {
  pci_address(1);
  synchronize_device(1);
}

// The number of calls that leave something behind.
int check(const char* name, const std::function<void()>& operation) {
  int wrong = 0, all = 0;
  for (failing = 0; failing <= all; ++failing) {
    const int number = failing;
    calls = 0, failed = "", current = 5;
    try {
      operation();
    } catch (const std::runtime_error&) {
    }
    if (!failing) all = calls;
    const int left = current;
    const bool not_restored = left != 5 && std::strcmp(failed, "cudaSetDevice") != 0;
    if (last_error != cudaSuccess || not_restored) {
      std::printf("%s, call %d, %s: last error %d, device %d\n", name, number, failed, last_error,
                  left);
      ++wrong;
    }
    last_error = cudaSuccess;
  }
  std::printf("%s: %d calls, %d wrong\n", name, all, wrong);
  return wrong;
}

}  // namespace
}  // namespace jaxkv

int main() {
  static char stream;
  for (const int device : {0, 1}) {
    jaxkv::set_program_stream(device, reinterpret_cast<cudaStream_t>(&stream));
  }
  int wrong = jaxkv::check("communicator", jaxkv::communicator_of_one_process);
  wrong += jaxkv::check("communicator of two processes", jaxkv::communicator_of_two_processes);
  wrong += jaxkv::check("pinned memory", jaxkv::pinned_memory);
  wrong += jaxkv::check("device", jaxkv::device);
  return wrong ? 1 : 0;
}
