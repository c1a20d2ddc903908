// A stream of asynchronous copies, and their order with the work of XLA's stream.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "transfer/block_copy.h"
#include "transfer/ticket.h"

namespace jaxkv::transfer {

struct TicketWrite {
  Ticket* ticket;
  Operation operation;
  std::vector<const void*> written;
  // XLA places the results of a call that writes host memory there, and frees host memory of a
  // program once the program is enqueued: the host writes such a ticket, and reads it, meanwhile.
  bool on_host;
};

// Writes `values` and the addresses of the arrays in device memory.
ffi::Error write_ticket(cudaStream_t stream, Ticket* ticket, const Ticket& values,
                        std::span<const void* const> written);
ffi::Error prepare_ticket_kernel();

class CopyStream;
// Enqueues a copy on the copy stream; `first` is the number of its first segment.
using Enqueue = std::function<ffi::Error(const CopyStream&, uint32_t first)>;

// A copy whose segments are enqueued one by one. It owns what it needs once the start has returned.
struct SegmentedCopy {
  int64_t run;            // XLA's run id of the execution that starts it, on `thread`
  size_t segments_ahead;  // enqueued before a wait for an earlier segment; all if not less
  std::function<ffi::Error(cudaStream_t, size_t segment)> enqueue;

  std::thread::id thread = std::this_thread::get_id();
  size_t num_segments = 0;
  uint32_t first = 0;  // the number of the first segment
  size_t enqueued = 0;
  bool overtaken = false;  // by the signals of a later copy, of another execution

  bool is_complete() const { return enqueued == num_segments; }
};

// Streams are created once per device, and destroyed only if the creation of the others fails.
class CopyStream {
 public:
  CopyStream() = default;
  CopyStream(const CopyStream&) = delete;
  ~CopyStream();

  ffi::Error create(uint32_t index, uint32_t* words);

  // Runs `enqueue(*this, first)` ordered after all work that is now on XLA's stream. XLA's stream
  // waits for the end of the copy if `joined`. Segment s must signal first + s.
  ffi::Error start(cudaStream_t xla_stream, const TicketWrite& ticket, size_t num_segments,
                   bool joined, const Enqueue& enqueue);

  // The same for a copy of which the first segments are enqueued now, and the others by
  // `enqueue_through`, called by waits of the same execution.
  ffi::Error start(cudaStream_t xla_stream, const TicketWrite& ticket, bool joined,
                   SegmentedCopy copy);

  // Enqueues all segments of the copy of an execution up to `segment` and those ahead of it; all if
  // it is negative.
  ffi::Error enqueue_through(cudaStream_t xla_stream, int64_t run, int64_t segment);

  // XLA's stream waits for all that is enqueued.
  ffi::Error join(cudaStream_t xla_stream);

  // Drops the incomplete copy of an earlier execution with the same run id on this thread; only an
  // execution that failed leaves one. XLA counts the run ids of a program up from a 32-bit hash of
  // it, so that those of two programs coincide sooner or later.
  void forget(int64_t run);

  // Number of copies that were enqueued entirely, and whether the first `started` >= 1 of them have
  // completed.
  uint64_t started() const { return started_.load(); }
  bool ended(uint64_t started) const;

  // Enqueues a signal that all segments up to `value` have arrived.
  ffi::Error signal(uint32_t value) const;

  cudaStream_t stream() const { return stream_; }
  uint32_t* counter() const { return words_; }
  uint32_t* arrived() const { return words_ + 1; }  // see SegmentProgress

 private:
  // Private functions require the mutex.
  ffi::Error begin(cudaStream_t xla_stream, const TicketWrite& ticket, size_t num_segments,
                   bool joined, const Enqueue& enqueue, const SegmentedCopy* segmented);
  ffi::Error enqueue_segments(SegmentedCopy& copy, size_t end) const;
  ffi::Error proceed(cudaStream_t xla_stream, int64_t run, int64_t segment);
  std::vector<SegmentedCopy>::iterator incomplete_of(int64_t run);
  ffi::Error enqueue_ticket(cudaStream_t xla_stream, const TicketWrite& ticket,
                            uint32_t first) const;
  ffi::Error record_end(cudaStream_t xla_stream, bool joined);

  static constexpr size_t kEvents = 64;
  // Executions that failed leave theirs: each is small, and beyond this number starts enqueue all.
  static constexpr size_t kMaxIncomplete = 64;

  std::mutex mutex_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t work_ = nullptr;                // of one stream, for which the other waits
  std::array<cudaEvent_t, kEvents> ended_{};  // of the most recent copies
  std::atomic<uint64_t> started_ = 0;
  uint32_t index_ = 0, next_ = 1;
  uint32_t* words_ = nullptr;
  std::vector<SegmentedCopy> incomplete_;  // one of each execution at most, in order of their start
};

inline constexpr size_t kCopyStreamWords = 1 + kMaxSegments;

}  // namespace jaxkv::transfer
