#include <array>
#include <atomic>

#include "common/cuda_check.h"
#include "common/device.h"

namespace jaxkv {
namespace {

std::string device_text(int ordinal) { return "CUDA device " + std::to_string(ordinal); }

CUresult get_context(CUcontext* context) {
  static const auto get = driver_function<CUresult (*)(CUcontext*)>("cuCtxGetCurrent");
  return get ? get(context) : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult set_context(CUcontext context) {
  static const auto set = driver_function<CUresult (*)(CUcontext)>("cuCtxSetCurrent");
  return set ? set(context) : CUDA_ERROR_NOT_SUPPORTED;
}

// That of XLA's programs, then our own.
using Streams = std::array<std::atomic<cudaStream_t>, 1 + kMaxOwnStreams>;
std::array<Streams, kMaxDevices> all_streams;

struct Event {
  cudaEvent_t event = nullptr;
  Event() = default;
  Event(const Event&) = delete;
  ~Event() {
    if (event && cudaEventDestroy(event) != cudaSuccess) (void)cudaGetLastError();
  }
};

void synchronize(cudaStream_t stream, const std::string& context) {
  Event end;  // and not cudaStreamSynchronize, which waits for work enqueued meanwhile
  JAXKV_CHECK_CUDA(
      cudaEventCreateWithFlags(&end.event, cudaEventDisableTiming | cudaEventBlockingSync),
      context);
  JAXKV_CHECK_CUDA(cudaEventRecord(end.event, stream), context);
  JAXKV_CHECK_CUDA(cudaEventSynchronize(end.event), context);
}

}  // namespace

// Not by cudaGetDevice and cudaSetDevice: a thread without a context has device 0 for them, and
// would create a context there, of several hundred MiB, in a process that uses another GPU.
DeviceGuard::DeviceGuard(int ordinal) {
  if (get_context(&previous_) != CUDA_SUCCESS) previous_ = nullptr;
  JAXKV_CHECK_CUDA(cudaSetDevice(ordinal), device_text(ordinal));
}

DeviceGuard::~DeviceGuard() { (void)set_context(previous_); }

void set_program_stream(int ordinal, CUstream_st* stream) {
  all_streams[ordinal][0].store(stream, std::memory_order_release);
}

void add_own_stream(int ordinal, CUstream_st* stream) {
  for (int i = 1; i <= kMaxOwnStreams; ++i) {
    cudaStream_t none = nullptr;
    if (all_streams[ordinal][i].compare_exchange_strong(none, stream)) return;
  }
}

void synchronize_device(int ordinal) {
  const DeviceGuard current(ordinal);
  for (const auto& stream : all_streams[ordinal]) {
    if (const cudaStream_t used = stream.load()) synchronize(used, device_text(ordinal));
  }
}

std::string pci_address(int ordinal) {
  char address[32];
  JAXKV_CHECK_CUDA(cudaDeviceGetPCIBusId(address, sizeof address, ordinal), device_text(ordinal));
  return address;
}

}  // namespace jaxkv
