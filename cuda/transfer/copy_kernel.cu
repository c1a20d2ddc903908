// Launches of the copy kernel: selection of the variant, and division into launches.
#include <algorithm>
#include <array>
#include <atomic>
#include <string>

#include "common/cuda_check.h"
#include "transfer/copy_kernel.cuh"

namespace jaxkv::transfer {
namespace {

static_assert(kInlineIds == ShareSize::kMaxCapacity, "one thread block may list them all");

template <int kBuffers, typename Word>
void* copy_kernel(bool to_dense, bool single_run) {
  if (to_dense) {
    return single_run ? reinterpret_cast<void*>(copy_blocks<kBuffers, Word, true, true>)
                      : reinterpret_cast<void*>(copy_blocks<kBuffers, Word, true, false>);
  }
  return single_run ? reinterpret_cast<void*>(copy_blocks<kBuffers, Word, false, true>)
                    : reinterpret_cast<void*>(copy_blocks<kBuffers, Word, false, false>);
}

// Properties of a copy that select its kernel.
struct Variant {
  int word_bytes;
  bool to_dense, single_run, few_buffers;
};

void* copy_kernel(Variant v) {
  if (v.few_buffers) return copy_kernel<kFewBuffers, uint4>(v.to_dense, v.single_run);
  switch (v.word_bytes) {
    case 16:
      return copy_kernel<kMaxBuffers, uint4>(v.to_dense, v.single_run);
    case 8:
      return copy_kernel<kMaxBuffers, uint2>(v.to_dense, v.single_run);
    case 4:
      return copy_kernel<kMaxBuffers, uint32_t>(v.to_dense, v.single_run);
    case 2:
      return copy_kernel<kMaxBuffers, uint16_t>(v.to_dense, v.single_run);
    default:
      return copy_kernel<kMaxBuffers, uint8_t>(v.to_dense, v.single_run);
  }
}

std::vector<void*> all_copy_kernels() {
  std::vector<void*> kernels;
  for (bool to_dense : {false, true}) {
    for (bool single_run : {false, true}) {
      for (int width : {1, 2, 4, 8, 16}) {
        kernels.push_back(copy_kernel({width, to_dense, single_run, false}));
      }
      kernels.push_back(copy_kernel({16, to_dense, single_run, true}));
    }
  }
  return kernels;
}

ffi::Error invalid(const std::string& message) {
  return ffi::Error::InvalidArgument("jaxkv page copy: " + message);
}

// Dynamic shared memory per thread block that all prepared devices support.
std::atomic<uint32_t> shared_limit{UINT32_MAX};
// SMs of the smallest prepared device.
std::atomic<uint32_t> sm_limit{UINT32_MAX};

void lower(std::atomic<uint32_t>& limit, uint32_t value) {
  for (uint32_t seen = limit; value < seen;) {
    if (limit.compare_exchange_weak(seen, value)) break;
  }
}

// The thread blocks of a launch, and the shared memory that each needs to check its share of the
// ids.
struct Grid {
  uint32_t blocks, max_pairs;  // per block
  ShareSize share;
};

Grid grid_of(uint32_t blocks, uint32_t words, const CopyParamsOf<kMaxBuffers>& p) {
  const uint32_t stretch = stretch_of(words, blocks);
  // A stretch may begin and end within a pair.
  const uint32_t max_pairs = std::min(p.last_pair - p.first_pair, stretch / p.words_per_pair() + 2);
  const uint32_t limit = std::min(kMaxSharedForIds, shared_limit.load());
  return {blocks, max_pairs, ShareSize(max_pairs).with_copy(p.ids.num_ids, limit)};
}

// One launch: segments of complete buffers, pairs [p.first_pair, p.last_pair).
ffi::Error launch(cudaStream_t stream, const BlockCopy& copy, Variant variant,
                  CopyParamsOf<kMaxBuffers>& p) {
  const uint64_t words = uint64_t{p.last_pair - p.first_pair} * p.words_per_pair();
  const uint64_t wanted = std::max<uint64_t>(1, (words + kCopyThreads - 1) / kCopyThreads);
  Grid grid = grid_of(static_cast<uint32_t>(std::min<uint64_t>(wanted, copy.num_sms)),
                      static_cast<uint32_t>(words), p);
  // More SMs than requested rather than failure, if the shares do not fit shared memory.
  while (!p.pairs && grid.share.bytes() > shared_limit.load() && grid.blocks < wanted) {
    const auto more = static_cast<uint32_t>(std::min<uint64_t>(wanted, 2 * grid.blocks));
    grid = grid_of(more, static_cast<uint32_t>(words), p);
  }
  p.share = grid.share;
  const uint32_t shared_bytes =
      p.pairs ? grid.max_pairs * static_cast<uint32_t>(sizeof(BlockPair)) : p.share.bytes();
  CopyParamsOf<kFewBuffers> few{p, {}, {}};
  if (variant.few_buffers) {
    std::copy_n(p.dense, kFewBuffers, few.dense);
    std::copy_n(p.strided, kFewBuffers, few.strided);
  }
  void* arguments[] = {variant.few_buffers ? static_cast<void*>(&few) : &p};
  JAXKV_RETURN_IF_CUDA_ERROR(cudaLaunchKernel(copy_kernel(variant), dim3(grid.blocks),
                                              dim3(kCopyThreads), arguments, shared_bytes, stream));
  return ffi::Error::Success();
}

ffi::Error launch_all(cudaStream_t stream, const BlockCopy& copy, const Pairs& pairs,
                      const SegmentProgress* progress) {
  const CopyGeometry& g = copy.geometry;
  const int width = word_bytes(copy);
  const int64_t block_words = g.block_bytes / width;
  if (block_words >= kMaxWords) {
    return invalid("block of " + std::to_string(g.block_bytes) + " bytes, must be below " +
                   std::to_string(int64_t{kMaxWords} * width));
  }
  const auto max_buffers =
      std::min<size_t>(kMaxBuffers, std::max<int64_t>(1, (kMaxWords - 1) / block_words));
  const size_t num_buffers = copy.dense.size();
  const size_t segment_buffers =
      progress ? progress->segment_buffers : std::min(max_buffers, num_buffers);
  if (segment_buffers > max_buffers) {
    return invalid("segment of " + std::to_string(segment_buffers) + " buffers, at most " +
                   std::to_string(max_buffers));
  }
  // A thread block stages the pairs of its share, and the partial pairs at both ends of its
  // stretch.
  const size_t staged_pairs =
      pairs.list.pairs ? copy.num_sms * size_t{ShareSize::kMaxCapacity - 2 * kAlignedWords}
                       : pairs.capacity;
  // Segments per launch: with progress signals as many as fit, unless each takes several launches.
  const size_t max_segments =
      progress && pairs.capacity <= staged_pairs ? kMaxBuffers / segment_buffers : 1;
  size_t buffers = 0;
  for (size_t b = 0; b < num_buffers; b += buffers) {
    buffers = std::min(max_segments * segment_buffers, num_buffers - b);
    const size_t of_segment = std::min(buffers, segment_buffers);
    const Variant variant{width, copy.to_dense, g.single_run(),
                          width == 16 && buffers <= kFewBuffers};
    CopyParamsOf<kMaxBuffers> p{copy_params(g, pairs, width, of_segment), {}, {}};
    p.num_segments = static_cast<uint32_t>(buffers / of_segment);
    if (b > 0) p.ids.errors = nullptr;
    std::copy_n(copy.dense.begin() + b, buffers, p.dense);
    std::copy_n(copy.strided.begin() + b, buffers, p.strided);
    const size_t launch_pairs = std::clamp<size_t>((kMaxWords - 1) / p.words_per_pair(), 1,
                                                   std::max<size_t>(1, staged_pairs));
    for (size_t first = 0; first == 0 || first < pairs.capacity; first += launch_pairs) {
      const size_t last = std::min(pairs.capacity, first + launch_pairs);
      p.first_pair = static_cast<uint32_t>(first);
      p.last_pair = static_cast<uint32_t>(last);
      if (progress && last == pairs.capacity) {
        const size_t segment = b / segment_buffers;
        p.counter = progress->counter;
        p.arrived = progress->arrived + segment;
        p.first_signal = progress->first + static_cast<uint32_t>(segment);
      }
      if (auto error = launch(stream, copy, variant, p); error.failure()) return error;
    }
  }
  return ffi::Error::Success();
}

}  // namespace

ffi::Error launch_copy(cudaStream_t stream, const BlockCopy& copy, const IdLists& ids,
                       ErrorRings* errors) {
  if (ids.sources.size() > kInlineIds) {
    return invalid(std::to_string(ids.sources.size()) + " ids in one launch, at most " +
                   std::to_string(kInlineIds));
  }
  return launch_all(stream, copy, {id_params(ids, errors), {}, ids.sources.size()}, nullptr);
}

ffi::Error launch_copy(cudaStream_t stream, const BlockCopy& copy, const PairList& list,
                       const SegmentProgress* progress) {
  return launch_all(stream, copy, checked_pairs(copy, list), progress);
}

uint32_t max_shared_bytes() { return shared_limit.load(); }
uint32_t max_sms() { return sm_limit.load(); }

ffi::Error prepare_copy_kernel(int32_t device) {
  static std::array<std::atomic<bool>, kMaxDevices> done{};  // called before every execution
  if (auto error = prepare_rings(device); error.failure()) return error;
  if (done[device].load()) return ffi::Error::Success();
  int max_shared = 0, num_sms = 0;
  uint32_t limit = UINT32_MAX;
  JAXKV_RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(&max_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  JAXKV_RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
  std::vector<void*> kernels = all_copy_kernels();
  for (void* kernel : group_kernels()) kernels.push_back(kernel);
  for (void* kernel : kernels) {
    cudaFuncAttributes attributes;
    JAXKV_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&attributes, kernel));
    const int max_bytes = max_shared - static_cast<int>(attributes.sharedSizeBytes);
    JAXKV_RETURN_IF_CUDA_ERROR(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, max_bytes));
    limit = std::min(limit, static_cast<uint32_t>(max_bytes));
  }
  lower(shared_limit, limit);
  lower(sm_limit, static_cast<uint32_t>(num_sms));
  done[device].store(true);
  return ffi::Error::Success();
}

}  // namespace jaxkv::transfer
