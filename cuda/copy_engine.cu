// Page copies by the copy engine: no SM is used, and the host reads the ids when it enqueues.
#include <algorithm>

#include "cuda_check.h"
#include "overlap.h"
#include "transfer.h"

namespace jaxkv {
namespace {

constexpr size_t kDescriptorsPerBatch = 1024;

struct Descriptors {
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<size_t> bytes;
  size_t buffer_begin = 0;

  explicit Descriptors(size_t most) {
    to.reserve(most);
    from.reserve(most);
    bytes.reserve(most);
  }

  // Copies are joined within a buffer only: neighbours in two allocations are no neighbours.
  void start_buffer() { buffer_begin = to.size(); }

  void add(std::byte* destination, const std::byte* source, size_t size) {
    const bool joins = to.size() > buffer_begin &&
                       static_cast<std::byte*>(to.back()) + bytes.back() == destination &&
                       static_cast<const std::byte*>(from.back()) + bytes.back() == source;
    if (joins) {
      bytes.back() += size;
    } else {
      to.push_back(destination);
      from.push_back(source);
      bytes.push_back(size);
    }
  }
};

// Of the buffers from `begin` up to `end`.
Descriptors describe_copies(const BlockCopy& copy, const std::vector<BlockPair>& pairs,
                            size_t begin, size_t end) {
  const CopyGeometry& g = copy.geometry;
  Descriptors all((end - begin) * pairs.size() * g.count0 * g.count1);
  for (size_t b = begin; b < end; ++b) {
    all.start_buffer();
    for (const auto& pair : pairs) {
      std::byte* dense = copy.dense[b] + copy.dense_block(pair) * g.block_bytes;
      std::byte* strided = copy.strided[b] + copy.strided_block(pair) * g.page_stride;
      for (int64_t i0 = 0; i0 < g.count0; ++i0) {
        for (int64_t i1 = 0; i1 < g.count1; ++i1, dense += g.run_bytes) {
          std::byte* run = strided + g.run_offset(i0, i1);
          all.add(copy.to_dense ? dense : run, copy.to_dense ? run : dense, g.run_bytes);
        }
      }
    }
  }
  return all;
}

ffi::Error enqueue_one_by_one(cudaStream_t stream, const Descriptors& all, size_t begin,
                              size_t end) {
  for (size_t i = begin; i < end; ++i) {
    JAXKV_CUDA_TRY(
        cudaMemcpyAsync(all.to[i], all.from[i], all.bytes[i], cudaMemcpyDefault, stream));
  }
  return ffi::Error::Success();
}

// Batches are bounded: drivers were seen to fail at some 50,000 descriptors (vLLM issue 49276).
ffi::Error enqueue_descriptors(cudaStream_t stream, Descriptors& all) {
  for (size_t begin = 0; begin < all.to.size(); begin += kDescriptorsPerBatch) {
    const size_t count = std::min(kDescriptorsPerBatch, all.to.size() - begin);
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    size_t first_with_attributes = 0;
    const cudaError_t status = cudaMemcpyBatchAsync(all.to.data() + begin, all.from.data() + begin,
                                                    all.bytes.data() + begin, count, &attributes,
                                                    &first_with_attributes, 1, stream);
    if (status == cudaSuccess) continue;
    (void)cudaGetLastError();
    if (status != cudaErrorNotSupported && status != cudaErrorCallRequiresNewerDriver) {
      return ffi::Error::Internal(std::string("jaxkv: cudaMemcpyBatchAsync failed: ") +
                                  cudaGetErrorString(status));
    }
    if (auto error = enqueue_one_by_one(stream, all, begin, begin + count); error.failure()) {
      return error;
    }
  }
  return ffi::Error::Success();
}

ffi::Error open_ids_for_dma(const IdList& list, const char* name) {
  if (list.header == 0) {
    return ffi::Error::InvalidArgument(std::string("jaxkv dma: ids of ") + name +
                                       " are no HostIds, and the host must read them");
  }
  return open_ids(list, name);
}

// The pairs to copy, of ids that the host reads now.
ffi::ErrorOr<std::vector<BlockPair>> read_pairs(cudaStream_t stream,
                                                ffi::Buffer<ffi::S32> source_ids,
                                                ffi::Buffer<ffi::S32> destination_ids,
                                                ffi::Dictionary attributes) {
  // A captured copy would replay these ids for ever; and a batch under capture is lost in silence.
  cudaStreamCaptureStatus capture;
  if (cudaStreamIsCapturing(stream, &capture) != cudaSuccess ||
      capture != cudaStreamCaptureStatusNone) {
    return ffi::Unexpected(
        ffi::Error::Internal("jaxkv: dma cannot be captured in a CUDA graph; use kernel"));
  }
  const auto ids = decode_ids(source_ids, destination_ids, attributes);
  if (!ids.has_value()) return ffi::Unexpected(ids.error());
  if (auto error = open_ids_for_dma(ids->sources, "the source"); error.failure()) {
    return ffi::Unexpected(error);
  }
  if (auto error = open_ids_for_dma(ids->destinations, "the destination"); error.failure()) {
    return ffi::Unexpected(error);
  }
  std::vector<PageErrorEntry> refused;
  auto pairs = plan_on_host(*ids, &refused);
  for (const auto& e : refused) record_on_host(e.fault, e.position, e.id, e.limit);
  return pairs;
}

ffi::Error copy_by_dma(cudaStream_t stream, ffi::Buffer<ffi::S32> source_ids,
                       ffi::Buffer<ffi::S32> destination_ids, ffi::RemainingArgs args,
                       ffi::RemainingRets rets, ffi::Dictionary attributes) {
  const auto copy = decode_copy(args, rets, attributes);
  if (!copy.has_value()) return copy.error();
  const auto pairs = read_pairs(stream, source_ids, destination_ids, attributes);
  if (!pairs.has_value()) return pairs.error();
  auto descriptors = describe_copies(*copy, *pairs, 0, copy->dense.size());
  return enqueue_descriptors(stream, descriptors);
}

ffi::Error start_by_dma(cudaStream_t stream, int32_t device, ffi::Buffer<ffi::S32> source_ids,
                        ffi::Buffer<ffi::S32> destination_ids, ffi::RemainingArgs args,
                        ffi::ResultBuffer<ffi::S32> ticket, ffi::RemainingRets rets,
                        ffi::Dictionary attributes) {
  const auto copy = decode_copy(args, rets, attributes);
  if (!copy.has_value()) return copy.error();
  const auto pairs = read_pairs(stream, source_ids, destination_ids, attributes);
  if (!pairs.has_value()) return pairs.error();
  auto enqueue = [&](const Lane& lane, uint32_t first, size_t segment_buffers) {
    auto error = ffi::Error::Success();
    for (size_t b = 0; b < copy->dense.size() && error.success(); b += segment_buffers) {
      auto descriptors = describe_copies(*copy, *pairs, b, b + segment_buffers);
      error = enqueue_descriptors(lane.stream(), descriptors);
      if (error.success()) error = lane.signal(first++);
    }
    return error;
  };
  return start_copy({stream, device, ticket, rets, attributes}, *copy, Engine::kCopyEngine,
                    enqueue);
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
                                  .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(StartCopyDma, start_by_dma,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .RemainingRets()
                                  .Attrs());

}  // namespace jaxkv
