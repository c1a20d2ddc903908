// Asynchronous copies on copy streams.
#include <algorithm>
#include <array>
#include <atomic>
#include <memory>

#include "common/cuda_check.h"
#include "common/device.h"
#include "common/error_ring.cuh"
#include "common/error_scope.h"
#include "transfer/async_copy.h"
#include "transfer/copy_kernel.h"
#include "transfer/started_copies.h"

namespace jaxkv::transfer {
namespace {

struct DeviceCopyStreams {
  std::array<CopyStream, kNumCopyStreams> copy_streams;
  uint32_t* words = nullptr;  // kCopyStreamWords per copy stream

  ~DeviceCopyStreams() { (void)cudaFree(words); }
};

std::array<std::atomic<DeviceCopyStreams*>, kMaxDevices> all_copy_streams;

enum class Engine : uint32_t { kKernel = 0, kCopyEngine };

CopyStream& copy_stream_of(int32_t device, bool to_dense, Engine engine) {
  const auto index = (to_dense ? 0 : 2) + static_cast<uint32_t>(engine);
  return all_copy_streams[device].load()->copy_streams[index];
}

struct Start {
  TicketWrite ticket;
  size_t num_segments;
};

ffi::Error check_start(StartCall call, const BlockCopy& copy, Start* start) {
  const auto num_buffers = static_cast<int64_t>(copy.dense.size());
  const int64_t step = call.segment_buffers;
  if (step < 1 || num_buffers % step || num_buffers / step > static_cast<int64_t>(kMaxSegments)) {
    return ffi::Error::InvalidArgument("jaxkv start_copy: " + std::to_string(num_buffers) +
                                       " buffers in segments of " + std::to_string(step) +
                                       ": must be a divisor, with at most " +
                                       std::to_string(kMaxSegments) + " segments");
  }
  start->num_segments = static_cast<size_t>(num_buffers / step);
  cudaStreamCaptureStatus capture;
  JAXKV_RETURN_IF_CUDA_ERROR(cudaStreamIsCapturing(call.stream, &capture));
  if (capture != cudaStreamCaptureStatusNone) {
    return ffi::Error::Internal("jaxkv start_copy: cannot be captured in a CUDA graph");
  }
  TicketWrite& ticket = start->ticket;
  ticket = {static_cast<Ticket*>(call.ticket->untyped_data()), call.operation, {}, !copy.to_dense};
  for (size_t i = 0; i < call.written.size(); ++i) {
    auto array = call.written.get<ffi::AnyBuffer>(i);
    if (!array.has_value()) return array.error();
    // A joined copy completes before XLA could copy an array, so the wait has nothing to check.
    ticket.written.push_back(call.joined ? nullptr : (*array)->untyped_data());
  }
  if (arrays_of_ticket(call.ticket->size_bytes()) != ticket.written.size()) {
    return ffi::Error::InvalidArgument("jaxkv start_copy: ticket for " +
                                       std::to_string(arrays_of_ticket(call.ticket->size_bytes())) +
                                       " arrays, expected " +
                                       std::to_string(ticket.written.size()));
  }
  return ffi::Error::Success();
}

ffi::Error start_by_kernel(cudaStream_t stream, int32_t device, ffi::Buffer<ffi::S32> planned,
                           ffi::RemainingArgs args, ffi::ResultBuffer<ffi::S32> ticket,
                           ffi::RemainingRets rets, CopyAttribute attribute,
                           int64_t segment_buffers, bool joined) {
  const auto copy = decode_copy(args, rets, attribute);
  if (!copy.has_value()) return copy.error();
  const auto list = decode_pairs(planned);
  if (!list.has_value()) return list.error();
  auto enqueue = [&](const CopyStream& copy_stream, uint32_t first) {
    const SegmentProgress progress{copy_stream.counter(), first, copy_stream.arrived(),
                                   static_cast<size_t>(segment_buffers)};
    return launch_copy(copy_stream.stream(), *copy, *list, &progress);
  };
  const Operation operation = operation_of(attribute);
  return start_copy({stream, device, operation, ticket, rets, segment_buffers, joined}, *copy,
                    enqueue);
}

ffi::Error prepare(int32_t device, ffi::RemainingArgs, ffi::RemainingRets,
                   ffi::Dictionary attributes) {
  if (auto error = prepare_copy_streams(device); error.failure()) return error;
  return prepare_rings(device, scope_of_call(attributes));
}

// Preparation of a start by the copy engine. XLA initializes all calls of an execution before it
// runs the first.
ffi::Error prepare_segmented(int32_t device, ffi::RunId run, ffi::RemainingArgs args,
                             ffi::RemainingRets rets, ffi::Dictionary attributes) {
  if (auto error = prepare(device, args, rets, attributes); error.failure()) return error;
  forget_copies(device, run.run_id);
  return ffi::Error::Success();
}

}  // namespace

ffi::Error prepare_copy_streams(int32_t device) {
  static std::mutex mutex;
  if (auto error = prepare_copy_kernel(device); error.failure()) return error;
  std::lock_guard lock(mutex);
  if (all_copy_streams[device].load()) return ffi::Error::Success();
  if (auto error = prepare_ticket_kernel(); error.failure()) return error;
  if (auto error = prepare_wait_kernel(); error.failure()) return error;
  auto copy_streams = std::make_unique<DeviceCopyStreams>();
  const size_t bytes = kNumCopyStreams * kCopyStreamWords * sizeof(uint32_t);
  JAXKV_RETURN_IF_CUDA_ERROR(cudaMalloc(&copy_streams->words, bytes));
  for (uint32_t i = 0; i < kNumCopyStreams; ++i) {
    if (auto error =
            copy_streams->copy_streams[i].create(i, copy_streams->words + i * kCopyStreamWords);
        error.failure()) {
      return error;
    }
  }
  // Not on the legacy stream, whose use fails while another thread captures a graph.
  const cudaStream_t stream = copy_streams->copy_streams[0].stream();
  JAXKV_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(copy_streams->words, 0, bytes, stream));
  JAXKV_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(stream));
  for (const CopyStream& copy_stream : copy_streams->copy_streams) {
    add_own_stream(device, copy_stream.stream());
  }
  all_copy_streams[device].store(copy_streams.release());
  return ffi::Error::Success();
}

void forget_copies(int32_t device, int64_t run) {
  for (const bool to_dense : {true, false}) {
    copy_stream_of(device, to_dense, Engine::kCopyEngine).forget(run);
  }
}

ffi::Error enqueue_through(cudaStream_t stream, int32_t device, int64_t run, int64_t segment) {
  for (const bool to_dense : {true, false}) {
    auto error =
        copy_stream_of(device, to_dense, Engine::kCopyEngine).enqueue_through(stream, run, segment);
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

ffi::Error start_copy(StartCall call, const BlockCopy& copy, const Enqueue& enqueue) {
  Start start;
  if (auto error = check_start(call, copy, &start); error.failure()) return error;
  return copy_stream_of(call.device, copy.to_dense, Engine::kKernel)
      .start(call.stream, start.ticket, start.num_segments, call.joined, enqueue);
}

ffi::Error start_copy(StartCall call, const BlockCopy& copy, SegmentedCopy segmented) {
  Start start;
  if (auto error = check_start(call, copy, &start); error.failure()) return error;
  segmented.num_segments = start.num_segments;
  return copy_stream_of(call.device, copy.to_dense, Engine::kCopyEngine)
      .start(call.stream, start.ticket, call.joined, std::move(segmented));
}

const uint32_t* copy_stream_words(int32_t device) { return all_copy_streams[device].load()->words; }

std::vector<uint64_t> started_copies() {
  std::vector<uint64_t> started;
  for (const auto& device : all_copy_streams) {
    const DeviceCopyStreams* of_device = device.load();
    for (uint32_t i = 0; i < kNumCopyStreams; ++i) {
      started.push_back(of_device ? of_device->copy_streams[i].started() : 0);
    }
  }
  return started;
}

bool copies_ended(const std::vector<uint64_t>& started) {
  for (size_t i = 0; i < std::min(started.size(), all_copy_streams.size() * kNumCopyStreams); ++i) {
    const size_t device = i / kNumCopyStreams;
    const DeviceCopyStreams* of_device = all_copy_streams[device].load();
    if (!started[i] || !of_device) continue;
    const DeviceGuard current(static_cast<int>(device));
    if (!of_device->copy_streams[i % kNumCopyStreams].ended(started[i])) return false;
  }
  return true;
}

// An error is not reported: that of the failed call is.
void join_copies(int32_t device, cudaStream_t xla_stream) {
  DeviceCopyStreams* of_device = all_copy_streams[device].load();
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (!of_device || cudaStreamIsCapturing(xla_stream, &capture) != cudaSuccess ||
      capture != cudaStreamCaptureStatusNone) {
    return;
  }
  for (CopyStream& copy_stream : of_device->copy_streams) (void)copy_stream.join(xla_stream);
}

using Stream = ffi::PlatformStream<cudaStream_t>;
using Int32s = ffi::Buffer<ffi::S32>;

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    PrepareCopyStreams, prepare,
    ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(PrepareSegmentedCopy, prepare_segmented,
                              ffi::Ffi::BindInitialize()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::RunId>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs());

// No command-buffer trait: the host assigns the number of each copy.
XLA_FFI_DEFINE_HANDLER_SYMBOL(StartCopyKernel, start_by_kernel,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<Int32s>()
                                  .RemainingArgs()
                                  .Ret<Int32s>()
                                  .RemainingRets()
                                  .Attr<CopyAttribute>("copy")
                                  .Attr<int64_t>("segment_buffers")
                                  .Attr<bool>("joined"));

}  // namespace jaxkv::transfer
