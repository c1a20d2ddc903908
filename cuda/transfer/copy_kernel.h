// Launches of the copy kernel: SMs that read and write pinned memory, and check the ids themselves.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "transfer/block_copy.h"

namespace jaxkv::transfer {

// Progress signals of an asynchronous copy: buffers are copied in segments (layers), in order.
struct SegmentProgress {
  uint32_t* counter;  // `first + s` once segment s has arrived; increases in order of s
  uint32_t first;
  uint32_t* arrived;  // device words, one per segment of the copy, 0 before the copy and after it
  size_t segment_buffers;  // buffers per segment; divides copy.dense.size()
};

// Enqueues check and copy of up to kInlineIds ids, in device or mapped host memory. Invalid ids are
// recorded in `errors`, the rings of the device, or not at all if it is null.
ffi::Error launch_copy(cudaStream_t stream, const BlockCopy& copy, const IdLists& ids,
                       ErrorRings* errors);

// Enqueues the copy of pairs that plan_pairs checked.
ffi::Error launch_copy(cudaStream_t stream, const BlockCopy& copy, const PairList& list,
                       const SegmentProgress* progress = nullptr);

// Enqueues the copies of a call, in one launch if possible: copies whose addresses have the same
// alignment share a launch. Its thread blocks divide the words of all copies evenly.
ffi::Error launch_copies(cudaStream_t stream, std::span<const GroupCopy> copies,
                         ErrorRings* errors);

// Dynamic shared memory per thread block that every copy kernel may use on all prepared devices.
uint32_t max_shared_bytes();
// SMs that all prepared devices have.
uint32_t max_sms();

// The kernels of launch_copies.
std::vector<void*> group_kernels();

// Everything that may allocate memory or load a module, for the current device. Idempotent, and
// cheap when repeated.
ffi::Error prepare_copy_kernel(int32_t device);

}  // namespace jaxkv::transfer
