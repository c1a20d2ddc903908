// Asynchronous copies on copy streams.
#include <algorithm>
#include <array>
#include <atomic>
#include <memory>

#include "common/cuda_check.h"
#include "common/driver.h"
#include "common/error_ring.cuh"
#include "common/error_scope.h"
#include "transfer/async_copy.h"
#include "transfer/copy_kernel.h"
#include "transfer/started_copies.h"
#include "transfer/ticket.cuh"

namespace jaxkv::transfer {
namespace {

struct DeviceCopyStreams {
  std::array<CopyStream, kNumCopyStreams> copy_streams;
  uint32_t* words = nullptr;  // kCopyStreamWords per copy stream
};

std::array<std::atomic<DeviceCopyStreams*>, kMaxDevices> all_copy_streams;

// Looked up at run time.
using WriteValue32 = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);

WriteValue32 stream_write() {
  static const auto write = driver_function<WriteValue32>("cuStreamWriteValue32");
  return write;
}

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

// Moves the ticket of a store to device memory, where waits read it.
ffi::Error move_ticket(cudaStream_t stream, ffi::Buffer<ffi::S32> on_host,
                       ffi::ResultBuffer<ffi::S32> on_device) {
  const size_t arrays = arrays_of_ticket(on_host.size_bytes());
  if (arrays == 0 || on_host.size_bytes() != on_device->size_bytes()) {
    return ffi::Error::InvalidArgument("jaxkv move_ticket: tickets of unequal size");
  }
  const auto* ticket = static_cast<const Ticket*>(on_host.untyped_data());
  return enqueue_ticket_write(stream, static_cast<Ticket*>(on_device->untyped_data()), *ticket,
                              {ticket->written, arrays});
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

ffi::Error CopyStream::create(uint32_t index, uint32_t* words) {
  int lowest = 0, highest = 0;
  JAXKV_RETURN_IF_CUDA_ERROR(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  // Higher priority than compute: compute always has work for all SMs, a copy needs few of them.
  JAXKV_RETURN_IF_CUDA_ERROR(
      cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest));
  JAXKV_RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&xla_work_, cudaEventDisableTiming));
  for (cudaEvent_t& event : ended_) {
    JAXKV_RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
  index_ = index;
  words_ = words;
  return ffi::Error::Success();
}

ffi::Error CopyStream::start(cudaStream_t xla_stream, const TicketWrite& ticket,
                             size_t num_segments, bool joined, const Enqueue& enqueue) {
  std::lock_guard lock(mutex_);
  return begin(xla_stream, ticket, num_segments, joined, enqueue, nullptr);
}

ffi::Error CopyStream::start(cudaStream_t xla_stream, const TicketWrite& ticket, bool joined,
                             SegmentedCopy copy) {
  std::lock_guard lock(mutex_);
  // Copies are in the order of their starts. But of another execution only its own waits know
  // whether its arrays still exist: it may have ended with an error.
  if (auto error = proceed(xla_stream, copy.run, -1); error.failure()) return error;
  const bool all = joined || incomplete_.size() == kMaxIncomplete;
  const size_t now = all ? copy.num_segments : std::min(copy.segments_ahead, copy.num_segments);
  auto enqueue = [&](const CopyStream&, uint32_t first) {
    copy.first = first;
    return enqueue_segments(copy, now);
  };
  auto error = begin(xla_stream, ticket, copy.num_segments, joined, enqueue, &copy);
  for (SegmentedCopy& other : incomplete_) other.overtaken |= copy.enqueued > 0;
  if (error.failure() || copy.is_complete()) return error;
  incomplete_.push_back(std::move(copy));
  return error;
}

ffi::Error CopyStream::begin(cudaStream_t xla_stream, const TicketWrite& ticket,
                             size_t num_segments, bool joined, const Enqueue& enqueue,
                             const SegmentedCopy* segmented) {
  const uint32_t first = next_;
  next_ += static_cast<uint32_t>(num_segments);
  JAXKV_RETURN_IF_CUDA_ERROR(cudaEventRecord(xla_work_, xla_stream));
  JAXKV_RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(stream_, xla_work_));
  auto error = enqueue(*this, first);
  if (error.success()) error = enqueue_ticket(xla_stream, ticket, first);
  if (error.success() && segmented && !segmented->is_complete()) return error;
  // A failed start may have enqueued copies whose arrays XLA frees now.
  auto not_recorded = record_end(xla_stream, joined || error.failure());
  return error.failure() ? error : not_recorded;
}

ffi::Error CopyStream::enqueue_segments(SegmentedCopy& copy, size_t end) const {
  for (; copy.enqueued < end; ++copy.enqueued) {
    auto error = copy.enqueue(stream_, copy.enqueued);
    // The counter must not decrease.
    if (error.success() && !copy.overtaken) {
      error = signal(copy.first + static_cast<uint32_t>(copy.enqueued));
    }
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

ffi::Error CopyStream::enqueue_through(cudaStream_t xla_stream, int64_t run, int64_t segment) {
  std::lock_guard lock(mutex_);
  return proceed(xla_stream, run, segment);
}

ffi::Error CopyStream::proceed(cudaStream_t xla_stream, int64_t run, int64_t segment) {
  const auto copy = incomplete_of(run);
  if (copy == incomplete_.end()) return ffi::Error::Success();
  size_t end = copy->num_segments;
  if (segment >= 0 && !copy->overtaken) {
    end = std::min(end, static_cast<size_t>(segment) + 1 + copy->segments_ahead);
  }
  const auto error = enqueue_segments(*copy, end);
  if (error.success() && !copy->is_complete()) return error;
  // The counter, which the wait compares, has passed this copy already if it was overtaken.
  const bool joined = copy->overtaken || error.failure();
  incomplete_.erase(copy);
  auto not_recorded = record_end(xla_stream, joined);
  return error.failure() ? error : not_recorded;
}

void CopyStream::forget(int64_t run) {
  std::lock_guard lock(mutex_);
  if (const auto copy = incomplete_of(run); copy != incomplete_.end()) incomplete_.erase(copy);
}

// XLA runs the handlers of an execution, on each device, in one thread.
std::vector<SegmentedCopy>::iterator CopyStream::incomplete_of(int64_t run) {
  return std::ranges::find_if(incomplete_, [&](const SegmentedCopy& copy) {
    return copy.run == run && copy.thread == std::this_thread::get_id();
  });
}

ffi::Error CopyStream::record_end(cudaStream_t xla_stream, bool joined) {
  const uint64_t number = started_.load();
  const cudaEvent_t event = ended_[number % kEvents];
  JAXKV_RETURN_IF_CUDA_ERROR(cudaEventRecord(event, stream_));
  started_.store(number + 1);
  if (joined) JAXKV_RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(xla_stream, event));
  return ffi::Error::Success();
}

// Without the mutex, which a start owns for long. An event that is recorded again in the meantime
// refers to a later copy of the same stream, which completes after the one in question.
bool CopyStream::ended(uint64_t started) const {
  const uint64_t now = started_.load();
  const uint64_t oldest = now < kEvents ? 0 : now - kEvents;
  const bool ended = cudaEventQuery(ended_[std::max(started - 1, oldest) % kEvents]) == cudaSuccess;
  if (!ended) (void)cudaGetLastError();
  return ended;
}

ffi::Error CopyStream::enqueue_ticket(cudaStream_t xla_stream, const TicketWrite& ticket,
                                      uint32_t first) const {
  const Ticket values{static_cast<uint16_t>(index_), static_cast<uint16_t>(ticket.operation),
                      first};
  if (!ticket.on_host) {
    return enqueue_ticket_write(xla_stream, ticket.ticket, values, ticket.written);
  }
  ticket.ticket->copy_stream = values.copy_stream;
  ticket.ticket->operation = values.operation;
  ticket.ticket->first = values.first;
  std::ranges::copy(ticket.written, ticket.ticket->written);
  return ffi::Error::Success();
}

ffi::Error CopyStream::signal(uint32_t value) const {
  const WriteValue32 cuStreamWriteValue32 = stream_write();
  JAXKV_RETURN_IF_CUDA_ERROR(
      cuStreamWriteValue32(stream_, reinterpret_cast<CUdeviceptr>(counter()), value, 0));
  return ffi::Error::Success();
}

ffi::Error prepare_copy_streams(int32_t device) {
  static std::mutex mutex;
  if (auto error = prepare_copy_kernel(device); error.failure()) return error;
  std::lock_guard lock(mutex);
  if (all_copy_streams[device].load()) return ffi::Error::Success();
  if (!stream_write()) {
    return ffi::Error::Internal(
        "jaxkv start_copy: the CUDA driver does not provide cuStreamWriteValue32; driver 580 or "
        "later is required");
  }
  cudaFuncAttributes attributes;
  JAXKV_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&attributes, write_ticket));
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
    const DeviceCopyStreams* of_device = all_copy_streams[i / kNumCopyStreams].load();
    if (started[i] && of_device && !of_device->copy_streams[i % kNumCopyStreams].ended(started[i]))
      return false;
  }
  return true;
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

// No command-buffer trait: the host reads the ticket when the call is enqueued.
XLA_FFI_DEFINE_HANDLER_SYMBOL(MoveTicketKernel, move_ticket,
                              ffi::Ffi::Bind().Ctx<Stream>().Arg<Int32s>().Ret<Int32s>());

}  // namespace jaxkv::transfer
