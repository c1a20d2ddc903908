// Page copies by the copy engine: no SM is used; the host reads the ids when the call is enqueued.
#include <algorithm>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/cuda_check.h"
#include "transfer/async_copy.h"
#include "transfer/block_copy.h"

namespace jaxkv::transfer {
namespace {

// Bounded batches: drivers were seen to fail at about 50,000 descriptors (vLLM issue 49276).
constexpr size_t kDescriptorsPerBatch = 1024;

// Blocks that follow each other on both sides are rows of one two-dimensional copy, if there are
// enough of them: it takes the copy engine 2.5 us more than a descriptor (H200, not recorded), 3 %
// of the time of 64 blocks of 64 KiB.
constexpr size_t kMinRows = 64;
constexpr int64_t kMaxPitch = std::numeric_limits<int32_t>::max();  // cudaDevAttrMaxPitch

// Thread-local: allocated once per thread, and not on the stack, where the arrays would move the
// driver's stack frames to memory that is in no cache.
struct Descriptors {
  void* to[kDescriptorsPerBatch];
  const void* from[kDescriptorsPerBatch];
  size_t bytes[kDescriptorsPerBatch];
};

Descriptors& descriptors() {
  static thread_local Descriptors kept;
  return kept;
}

// Descriptors not yet passed to the driver; one batch per thread at a time.
class Batch {
 public:
  bool full() const { return size_ == kDescriptorsPerBatch; }

  // Only copies within one buffer are coalesced: a descriptor must not span two allocations.
  void start_buffer() { to_end_ = nullptr; }

  // The batch must not be full.
  void add(std::byte* destination, const std::byte* source, size_t bytes) {
    if (destination == to_end_ && source == from_end_) {
      kept_.bytes[size_ - 1] += bytes;
    } else {
      kept_.to[size_] = destination;
      kept_.from[size_] = source;
      kept_.bytes[size_++] = bytes;
    }
    to_end_ = destination + bytes;
    from_end_ = source + bytes;
  }

  // Passes all descriptors to the driver and leaves the batch empty.
  ffi::Error enqueue(cudaStream_t stream) {
    const size_t count = std::exchange(size_, 0);
    start_buffer();
    if (count == 0) return ffi::Error::Success();
    if (count == 1) return enqueue_one_by_one(stream, count);  // cheaper than a batch
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    size_t first_with_attributes = 0;
    const cudaError_t status = cudaMemcpyBatchAsync(kept_.to, kept_.from, kept_.bytes, count,
                                                    &attributes, &first_with_attributes, 1, stream);
    if (status == cudaSuccess) return ffi::Error::Success();
    if (status == cudaErrorNotSupported || status == cudaErrorCallRequiresNewerDriver) {
      (void)cudaGetLastError();
      return enqueue_one_by_one(stream, count);
    }
    return ffi::Error::Internal(cuda_failure("cudaMemcpyBatchAsync", __FILE__, __LINE__, status,
                                             std::to_string(count) + " descriptors"));
  }

 private:
  ffi::Error enqueue_one_by_one(cudaStream_t stream, size_t count) const {
    for (size_t i = 0; i < count; ++i) {
      JAXKV_RETURN_IF_CUDA_ERROR(
          cudaMemcpyAsync(kept_.to[i], kept_.from[i], kept_.bytes[i], cudaMemcpyDefault, stream));
    }
    return ffi::Error::Success();
  }

  Descriptors& kept_ = descriptors();
  size_t size_ = 0;
  const std::byte* to_end_ = nullptr;  // ends of the last descriptor, if it may be extended
  const std::byte* from_end_ = nullptr;
};

// Enqueues the copies of one buffer.
class BufferCopy {
 public:
  BufferCopy(cudaStream_t stream, const BlockCopy& copy, size_t buffer)
      : stream_(stream), copy_(copy), buffer_(buffer) {}

  std::byte* dense(BlockPair pair) const {
    return copy_.dense[buffer_] + copy_.dense_block(pair) * copy_.geometry.dense_stride;
  }
  std::byte* strided(BlockPair pair) const {
    return copy_.strided[buffer_] + copy_.strided_block(pair) * copy_.geometry.page_stride;
  }

  // A block, by a descriptor for each run.
  ffi::Error add_block(BlockPair pair, Batch& batch) const {
    const CopyGeometry& g = copy_.geometry;
    std::byte* block = dense(pair);
    for (int64_t i0 = 0; i0 < g.count0; ++i0) {
      for (int64_t i1 = 0; i1 < g.count1; ++i1, block += g.run_bytes) {
        std::byte* run = strided(pair) + g.run_offset(i0, i1);
        if (batch.full()) {
          if (auto error = batch.enqueue(stream_); error.failure()) return error;
        }
        batch.add(copy_.to_dense ? block : run, copy_.to_dense ? run : block, g.run_bytes);
      }
    }
    return ffi::Error::Success();
  }

  // Consecutive blocks, each of one run, as the rows of one copy.
  ffi::Error enqueue_rows(BlockPair first, size_t rows) const {
    const CopyGeometry& g = copy_.geometry;
    const auto dense_pitch = static_cast<size_t>(g.dense_stride);
    const auto strided_pitch = static_cast<size_t>(g.page_stride);
    const bool to_dense = copy_.to_dense;
    JAXKV_RETURN_IF_CUDA_ERROR(cudaMemcpy2DAsync(
        to_dense ? dense(first) : strided(first), to_dense ? dense_pitch : strided_pitch,
        to_dense ? strided(first) : dense(first), to_dense ? strided_pitch : dense_pitch,
        static_cast<size_t>(g.run_bytes), rows, cudaMemcpyDefault, stream_));
    return ffi::Error::Success();
  }

 private:
  cudaStream_t stream_;
  const BlockCopy& copy_;
  size_t buffer_;
};

// Number of pairs, from the first one on, whose blocks follow each other on both sides.
size_t consecutive(std::span<const BlockPair> pairs) {
  size_t count = 1;
  while (count < pairs.size() && pairs[count].source == pairs[count - 1].source + 1 &&
         pairs[count].destination == pairs[count - 1].destination + 1) {
    ++count;
  }
  return count;
}

// Whether consecutive blocks may be rows of one copy. Blocks without a gap on either side become
// one descriptor anyway.
bool has_rows(const CopyGeometry& g) {
  return g.single_run() && std::max(g.dense_stride, g.page_stride) <= kMaxPitch &&
         (g.dense_stride != g.run_bytes || g.page_stride != g.run_bytes);
}

// Enqueues the copies of the buffers [begin, end).
ffi::Error enqueue_copies(cudaStream_t stream, const BlockCopy& copy,
                          std::span<const BlockPair> pairs, size_t begin, size_t end) {
  const bool in_rows = has_rows(copy.geometry);
  Batch batch;
  for (size_t b = begin; b < end; ++b) {
    const BufferCopy buffer(stream, copy, b);
    batch.start_buffer();
    for (size_t i = 0; i < pairs.size();) {
      const size_t rows = in_rows ? consecutive(pairs.subspan(i)) : 1;
      if (rows >= kMinRows) {
        if (auto error = buffer.enqueue_rows(pairs[i], rows); error.failure()) return error;
        i += rows;
        continue;
      }
      for (const size_t last = i + rows; i < last; ++i) {
        if (auto error = buffer.add_block(pairs[i], batch); error.failure()) return error;
      }
    }
  }
  return batch.enqueue(stream);
}

// Reads and validates the ids on the host, now.
ffi::ErrorOr<SelectedPairs> read_pairs(ffi::Buffer<ffi::S32> source_ids,
                                       ffi::Buffer<ffi::S32> destination_ids,
                                       CopyAttribute attribute) {
  const auto ids = decode_ids(source_ids, destination_ids, attribute);
  if (!ids.has_value()) return ffi::Unexpected(ids.error());
  if (auto error = check_host_ids(ids->sources, "the source"); error.failure()) {
    return ffi::Unexpected(error);
  }
  if (!ids->share_operand()) {
    if (auto error = check_host_ids(ids->destinations, "the destination"); error.failure()) {
      return ffi::Unexpected(error);
    }
  }
  RejectedIds rejected;
  auto selected = select_pairs(*ids, &rejected);
  if (rejected.count) record_host_errors(ids->scope, rejected.first, rejected.count);
  return ffi::ErrorOr<SelectedPairs>(std::move(selected));
}

ffi::Error copy_by_dma(cudaStream_t stream, ffi::Buffer<ffi::S32> source_ids,
                       ffi::Buffer<ffi::S32> destination_ids, ffi::RemainingArgs args,
                       ffi::RemainingRets rets, CopyAttribute attribute) {
  // A captured copy would replay these ids forever, and a batch under capture is dropped silently.
  cudaStreamCaptureStatus capture;
  JAXKV_RETURN_IF_CUDA_ERROR(cudaStreamIsCapturing(stream, &capture));
  if (capture != cudaStreamCaptureStatusNone) {
    return ffi::Error::Internal(
        "jaxkv page copy: implementation 'dma' cannot be captured in a CUDA graph; use 'kernel'");
  }
  const auto copy = decode_copy(args, rets, attribute);
  if (!copy.has_value()) return copy.error();
  const auto selected = read_pairs(source_ids, destination_ids, attribute);
  if (!selected.has_value()) return selected.error();
  return enqueue_copies(stream, *copy, selected->pairs, 0, copy->dense.size());
}

// What segments that are enqueued after the start need: XLA keeps the memory, not the lists.
struct OwnedCopy {
  OwnedCopy(const BlockCopy& decoded, std::span<const BlockPair> selected)
      : copy(decoded),
        dense(copy.dense.begin(), copy.dense.end()),
        strided(copy.strided.begin(), copy.strided.end()),
        pairs(selected.begin(), selected.end()) {
    copy.dense = dense;
    copy.strided = strided;
  }
  OwnedCopy(const OwnedCopy&) = delete;

  BlockCopy copy;
  std::vector<std::byte*> dense, strided;
  std::vector<BlockPair> pairs;
};

ffi::Error start_by_dma(cudaStream_t stream, int32_t device, ffi::RunId run,
                        ffi::Buffer<ffi::S32> source_ids, ffi::Buffer<ffi::S32> destination_ids,
                        ffi::RemainingArgs args, ffi::ResultBuffer<ffi::S32> ticket,
                        ffi::RemainingRets rets, CopyAttribute attribute, int64_t segment_buffers,
                        bool joined, int64_t segments_ahead, bool deferred) {
  const auto decoded = decode_copy(args, rets, attribute);
  if (!decoded.has_value()) return decoded.error();
  const auto selected = read_pairs(source_ids, destination_ids, attribute);
  if (!selected.has_value()) return selected.error();
  const auto owned = std::make_shared<const OwnedCopy>(*decoded, selected->pairs);
  const auto step = static_cast<size_t>(segment_buffers);
  auto enqueue = [owned, step](cudaStream_t copy_stream, size_t segment) {
    const size_t begin = segment * step;
    return enqueue_copies(copy_stream, owned->copy, owned->pairs, begin, begin + step);
  };
  const size_t ahead = deferred ? static_cast<size_t>(std::max<int64_t>(segments_ahead, 1))
                                : std::numeric_limits<size_t>::max();
  const Operation operation = operation_of(attribute);
  return start_copy({stream, device, operation, ticket, rets, segment_buffers, joined}, *decoded,
                    SegmentedCopy{run.run_id, ahead, enqueue});
}

}  // namespace

// No command-buffer traits: the host reads the ids when the call is enqueued.
XLA_FFI_DEFINE_HANDLER_SYMBOL(CopyBlocksDma, copy_by_dma,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<CopyAttribute>("copy"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(StartCopyDma, start_by_dma,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::RunId>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .RemainingRets()
                                  .Attr<CopyAttribute>("copy")
                                  .Attr<int64_t>("segment_buffers")
                                  .Attr<bool>("joined")
                                  .Attr<int64_t>("segments_ahead")
                                  .Attr<bool>("deferred"));

}  // namespace jaxkv::transfer
