// Baselines of the benchmarks, and stamps, which record when XLA reaches a point in a program.
//
// Compiled by bench/harness/copy_baselines.py when a benchmark starts; BENCH_CUDA is defined if
// there is a GPU.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"
#ifdef BENCH_CUDA
#include <cuda_runtime.h>
#endif

namespace ffi = xla::ffi;

namespace {

constexpr size_t kSlots = 2;
std::array<double, kSlots> host_seconds;

double now() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(since).count();
}

#ifdef BENCH_CUDA
enum Baseline : int64_t { kBatch = 0, kLoop = 1, kShortBatch = 2 };

// Drivers were seen to fail at about 50,000 descriptors in one call (vLLM issue 49276).
constexpr size_t kDescriptorsPerBatch = 32768, kDescriptorsPerShortBatch = 1024;

std::array<cudaEvent_t, kSlots> events;

#define CUDA_TRY(expression) \
  if (const cudaError_t status = (expression); status != cudaSuccess) return status

cudaError_t submit(int64_t baseline, void* const* to, const void* const* from, const size_t* bytes,
                   size_t count, bool pinned, cudaStream_t stream) {
  if (baseline == kLoop) {
    for (size_t i = 0; i < count; ++i) {
      CUDA_TRY(cudaMemcpyAsync(to[i], from[i], bytes[i], cudaMemcpyDefault, stream));
    }
    return cudaSuccess;
  }
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = pinned ? cudaMemcpySrcAccessOrderAny : cudaMemcpySrcAccessOrderStream;
  size_t first_with_attributes = 0;
  const size_t batch = baseline == kShortBatch ? kDescriptorsPerShortBatch : kDescriptorsPerBatch;
  for (size_t begin = 0; begin < count; begin += batch) {
    const size_t size = std::min(batch, count - begin);
    CUDA_TRY(cudaMemcpyBatchAsync(to + begin, from + begin, bytes + begin, size, &attributes,
                                  &first_with_attributes, 1, stream));
  }
  return cudaSuccess;
}

ffi::Error failure(cudaError_t status) {
  return ffi::Error::Internal(std::string("baseline: ") + cudaGetErrorString(status));
}

ffi::Error stamp(cudaStream_t stream, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>, int64_t slot) {
  cudaEvent_t& event = events.at(slot);
  if (event == nullptr) {
    if (const auto status = cudaEventCreate(&event); status != cudaSuccess) return failure(status);
  }
  if (slot != 0) host_seconds.at(slot) = now();  // excludes the host time of the event itself
  if (const auto status = cudaEventRecord(event, stream); status != cudaSuccess) {
    return failure(status);
  }
  if (slot == 0) host_seconds.at(slot) = now();
  return ffi::Error::Success();
}

// The destination is aliased to the result; the ids are in host memory, written by the host.
ffi::Error copy(cudaStream_t stream, ffi::AnyBuffer source, ffi::Buffer<ffi::S32> source_ids,
                ffi::Buffer<ffi::S32> destination_ids, ffi::AnyBuffer,
                ffi::Result<ffi::AnyBuffer> destination, int64_t block_bytes, int64_t baseline,
                int64_t pinned) {
  static thread_local std::vector<void*> to;
  static thread_local std::vector<const void*> from;
  static thread_local std::vector<size_t> bytes;
  const size_t count = source_ids.element_count();
  to.resize(count);
  from.resize(count);
  bytes.assign(count, block_bytes);
  for (size_t i = 0; i < count; ++i) {
    from[i] = static_cast<const std::byte*>(source.untyped_data()) +
              source_ids.typed_data()[i] * block_bytes;
    to[i] = static_cast<std::byte*>(destination->untyped_data()) +
            destination_ids.typed_data()[i] * block_bytes;
  }
  const auto status =
      submit(baseline, to.data(), from.data(), bytes.data(), count, pinned != 0, stream);
  return status == cudaSuccess ? ffi::Error::Success() : failure(status);
}
#else
ffi::Error stamp(ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>, int64_t slot) {
  host_seconds.at(slot) = now();
  return ffi::Error::Success();
}
#endif

}  // namespace

#ifdef BENCH_CUDA
XLA_FFI_DEFINE_HANDLER_SYMBOL(Stamp, stamp,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("slot"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(BaselineCopy, copy,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("block_bytes")
                                  .Attr<int64_t>("baseline")
                                  .Attr<int64_t>("pinned"));
#else
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    Stamp, stamp,
    ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Attr<int64_t>("slot"));
#endif

extern "C" {

// Seconds between the last two stamps, on the host and on the GPU (NaN without a GPU). Call it when
// the device is idle.
void stamped(double seconds[2]) {
  seconds[0] = host_seconds[1] - host_seconds[0];
  seconds[1] = std::numeric_limits<double>::quiet_NaN();
#ifdef BENCH_CUDA
  float ms;
  if (events[1] && cudaEventElapsedTime(&ms, events[0], events[1]) == cudaSuccess) {
    seconds[1] = ms * 1e-3;
  }
#endif
}

#ifdef BENCH_CUDA
const char* baseline_error(int status) {
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}

// Copies `calls` times on a stream of its own and synchronizes once at the end. The copies cycle
// through `num_sets` sets of `count` blocks, from set `first_set` on. seconds, per call: total time
// including the synchronization, and host time of the submissions.
int baseline_run(int64_t baseline, void* const* to, const void* const* from, const size_t* bytes,
                 size_t count, int num_sets, int first_set, int pinned, int calls,
                 double seconds[2]) {
  static cudaStream_t stream = nullptr;
  if (!stream) CUDA_TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const double start = now();
  for (int call = 0; call < calls; ++call) {
    const size_t first = (first_set + call) % num_sets * count;
    CUDA_TRY(submit(baseline, to + first, from + first, bytes, count, pinned != 0, stream));
  }
  seconds[1] = (now() - start) / calls;
  CUDA_TRY(cudaStreamSynchronize(stream));
  seconds[0] = (now() - start) / calls;
  return cudaSuccess;
}
#endif
}
