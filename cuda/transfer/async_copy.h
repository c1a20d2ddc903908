// Copies on streams of our own, beside XLA's: what start_load and start_store enqueue.
//
// A lane is a stream for one direction and one engine of a device, so copies of a lane arrive in
// the order in which they were started. Its counter says how far it is: segment s of a copy (a
// layer) has arrived once the counter is first + s or later. The ticket holds that number, and a
// wait is a kernel on XLA's stream that compares the two: no host takes part, so a wait may be
// replayed in a CUDA graph. (XLA also records graphs before it has run the start.)
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <functional>
#include <mutex>

#include "transfer/block_copy.h"

namespace jaxkv::transfer {

enum class Engine : uint32_t { kKernel = 0, kCopyEngine };

// What start leaves in memory of XLA's. A wait that gets another array than was written got a copy
// that XLA made before the bytes arrived.
struct Ticket {
  uint32_t copy_stream;
  uint32_t first;
  const void* written[];
};

struct TicketWrite {
  Ticket* ticket;
  std::vector<const void*> written;
};

class CopyStream;
// Enqueues a copy on the lane; gets the number of its first segment.
using Enqueue = std::function<ffi::Error(const CopyStream&, uint32_t first)>;

class CopyStream {
 public:
  ffi::Error create(uint32_t index, uint32_t* words);

  // Runs `enqueue(lane, first)` behind all that XLA's stream holds now; XLA's stream waits for its
  // end if `joined`, or if it failed halfway. Segment s is to signal first + s.
  ffi::Error start(cudaStream_t xla_stream, const TicketWrite& ticket, size_t num_segments,
                   bool joined, const Enqueue& enqueue);

  // How many copies were started, and whether the first `started` >= 1 of them have ended.
  uint64_t started() const { return started_.load(); }
  bool ended(uint64_t started) const;

  // Enqueues that everything up to segment `value` has arrived.
  ffi::Error signal(uint32_t value) const;

  cudaStream_t stream() const { return stream_; }
  uint32_t* counter() const { return words_; }
  uint32_t* arrived() const { return words_ + 1; }  // see Progress

 private:
  ffi::Error enqueue_ticket(cudaStream_t xla_stream, const TicketWrite& ticket,
                            uint32_t first) const;
  ffi::Error record_end(cudaStream_t xla_stream, bool joined);

  static constexpr size_t kEvents = 64;

  std::mutex mutex_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t behind_ = nullptr;
  std::array<cudaEvent_t, kEvents> ended_{};  // of the copies started last
  std::atomic<uint64_t> started_ = 0;
  uint32_t index_ = 0, next_ = 1;
  uint32_t* words_ = nullptr;
};

inline constexpr size_t kMaxSegments = 1023;  // of one copy

// Creates the lanes of a device: everything that allocates or loads a module.
ffi::Error prepare_copy_streams(int32_t device);

struct StartCall {
  cudaStream_t stream;
  int32_t device;
  ffi::ResultBuffer<ffi::S32> ticket;
  ffi::RemainingRets written;
  int64_t segment_buffers;
  bool joined;
};

// Enqueues a copy on the lane for its direction and `engine`, and writes its ticket.
ffi::Error start_copy(StartCall call, const BlockCopy& copy, Engine engine, const Enqueue& enqueue);

}  // namespace jaxkv::transfer
