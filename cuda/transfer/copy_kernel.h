// The copy kernel, to be launched: SMs read and write pinned memory, and check the ids themselves.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "transfer/block_copy.h"

namespace jaxkv::transfer {

// How a side-stream copy tells how far it is: buffers are copied in segments (layers), in order.
struct SegmentProgress {
  uint32_t* counter;  // `first + s` once segment s has arrived, in order of s
  uint32_t first;
  uint32_t* arrived;       // device words, one for each segment of the copy, 0 before it and after
  size_t segment_buffers;  // buffers of a segment; divides copy.dense.size()
};

// Enqueues check and copy of up to kInlineIds ids, which may lie in device or mapped host memory.
// Refused ids are recorded in `errors`, the device's rings, or nowhere if it is null.
ffi::Error launch_copy(cudaStream_t stream, const BlockCopy& copy, const IdLists& ids,
                       ErrorRings* errors);

// Enqueues the copy of pairs that launch_plan checked.
ffi::Error launch_copy(cudaStream_t stream, const BlockCopy& copy, const PairList& list,
                       const SegmentProgress* progress = nullptr);

// Everything that may allocate or load a module, for the current device. Cheap if done before.
ffi::Error prepare_copy_kernel(int32_t device);

}  // namespace jaxkv::transfer
