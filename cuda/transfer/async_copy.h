// Asynchronous copies on streams of our own, concurrent with XLA's: the operations that start_load,
// start_store and start_swap enqueue.
//
// A copy stream serves one direction and one engine of a device, so its copies arrive in the order
// in which they were started. Its counter records the progress: segment s of a copy (a layer) has
// arrived once the counter is first + s or later. The ticket contains `first`, and a wait is a
// kernel on XLA's stream that compares the two: the host takes no part, so a wait can be replayed
// in a CUDA graph. (XLA also records graphs before it has run the start.)
//
// The exception is a long copy by the copy engine: a descriptor costs the host about 1 us, and
// compute that follows the start would be launched late. If the waits of the same program cover the
// copy, on every path (buffer_lifetime.py decides), the start enqueues the first segments only, and
// each wait some of the others before its kernel. These waits cannot be captured. A kernel never
// waits for a segment that is not yet enqueued.
#pragma once

#include <cuda_runtime.h>

#include "transfer/copy_stream.h"

namespace jaxkv::transfer {

inline constexpr uint32_t kNumCopyStreams = 4;  // load and store, kernel and copy engine

// Creates the copy streams of a device, including everything that allocates memory or loads a
// module.
ffi::Error prepare_copy_streams(int32_t device);
ffi::Error prepare_wait_kernel();

// kCopyStreamWords per copy stream of a prepared device.
const uint32_t* copy_stream_words(int32_t device);

struct StartCall {
  cudaStream_t stream;
  int32_t device;
  Operation operation;
  ffi::ResultBuffer<ffi::S32> ticket;
  ffi::RemainingRets written;
  int64_t segment_buffers;
  bool joined;
};

// Enqueues a copy on the copy stream of its direction, and writes its ticket: by a kernel, or by
// the copy engine.
ffi::Error start_copy(StartCall call, const BlockCopy& copy, const Enqueue& enqueue);
ffi::Error start_copy(StartCall call, const BlockCopy& copy, SegmentedCopy segments);

// `CopyStream::forget` for both directions; before an execution starts its first copy.
void forget_copies(int32_t device, int64_t run);

// Enqueues the segments that a wait of the execution `run` needs, of both directions: a ticket,
// which names the copy, is known on the device only.
ffi::Error enqueue_through(cudaStream_t stream, int32_t device, int64_t run, int64_t segment);

}  // namespace jaxkv::transfer
