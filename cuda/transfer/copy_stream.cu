// Copy streams.
#include <algorithm>

#include "common/cuda_check.h"
#include "common/driver.h"
#include "transfer/copy_stream.h"

namespace jaxkv::transfer {
namespace {

// Looked up at run time.
using WriteValue32 = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);

WriteValue32 stream_write() {
  static const auto write = driver_function<WriteValue32>("cuStreamWriteValue32");
  return write;
}

}  // namespace

CopyStream::~CopyStream() {
  for (const cudaEvent_t event : ended_) {
    if (event) (void)cudaEventDestroy(event);
  }
  if (work_) (void)cudaEventDestroy(work_);
  if (stream_) (void)cudaStreamDestroy(stream_);
}

ffi::Error CopyStream::create(uint32_t index, uint32_t* words) {
  if (!stream_write()) {
    return ffi::Error::Internal(
        "jaxkv start_copy: the CUDA driver does not provide cuStreamWriteValue32; driver 580 or "
        "later is required");
  }
  int lowest = 0, highest = 0;
  JAXKV_RETURN_IF_CUDA_ERROR(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  // Higher priority than compute: compute always has work for all SMs, a copy needs few of them.
  JAXKV_RETURN_IF_CUDA_ERROR(
      cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest));
  JAXKV_RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&work_, cudaEventDisableTiming));
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
  JAXKV_RETURN_IF_CUDA_ERROR(cudaEventRecord(work_, xla_stream));
  JAXKV_RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(stream_, work_));
  auto error = enqueue(*this, first);
  if (error.success()) error = enqueue_ticket(xla_stream, ticket, first);
  if (error.success() && segmented && !segmented->is_complete()) return error;
  auto not_recorded = record_end(xla_stream, joined);
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
  const bool joined = copy->overtaken;
  incomplete_.erase(copy);
  auto not_recorded = record_end(xla_stream, joined);
  return error.failure() ? error : not_recorded;
}

ffi::Error CopyStream::join(cudaStream_t xla_stream) {
  std::lock_guard lock(mutex_);
  JAXKV_RETURN_IF_CUDA_ERROR(cudaEventRecord(work_, stream_));
  JAXKV_RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(xla_stream, work_));
  return ffi::Error::Success();
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
    return write_ticket(xla_stream, ticket.ticket, values, ticket.written);
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

}  // namespace jaxkv::transfer
