// Page copies by a CUDA kernel: SMs read and write pinned memory, ids are on the device,
// capturable.
//
// A copy is two calls: plan_pairs checks the ids and lists the pairs that may be copied, and
// copy_blocks moves all buffers' words in one flat index space, so that its rate does not depend on
// the size of a page. They are two FFI calls because XLA puts every result of a call that writes
// host memory into host memory, where the plan's atomics would cross the link.
#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>

#include "cuda_check.h"
#include "transfer.h"

namespace jaxkv {
namespace {

constexpr int kMaxDevices = 64;
constexpr int kMaxBuffers = 256;  // 4 KiB of kernel parameters
constexpr int kCopyThreads = 512;
constexpr int kWordsInFlight = 8;  // independent loads per thread: PCIe latency is ~1 us
constexpr int kPlanThreads = 1024;
constexpr int kPlanOneBlock = 8 * kPlanThreads;
constexpr uint32_t kMaxWords = 1u << 31;  // FastDivisor's range

// ---------------------------------------------------------------------------------------------
// Errors

std::array<std::atomic<PageErrorRing*>, kMaxDevices> device_rings;

// Mapped host memory: written only when an id is refused, read by the host without a sync.
ffi::Error create_ring(int32_t device) {
  static std::mutex mutex;
  if (device < 0 || device >= kMaxDevices) {
    return ffi::Error::Internal("jaxkv: device ordinal " + std::to_string(device) +
                                " is outside [0, 64)");
  }
  std::lock_guard lock(mutex);
  if (device_rings[device].load()) return ffi::Error::Success();
  PageErrorRing* ring = nullptr;
  JAXKV_CUDA_TRY(cudaHostAlloc(&ring, sizeof *ring, cudaHostAllocPortable | cudaHostAllocMapped));
  *ring = {};
  watch_ring(ring);
  device_rings[device].store(ring);
  return ffi::Error::Success();
}

// ---------------------------------------------------------------------------------------------
// Kernels

// x / divisor by a multiplication, for x < 2^31.
struct FastDivisor {
  uint32_t divisor, multiplier, shift;

  explicit FastDivisor(uint32_t d) : divisor(d), shift(0) {
    while ((uint64_t{1} << shift) < d) ++shift;
    multiplier =
        static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - d)) / d + 1);
  }
  __device__ uint32_t divide(uint32_t x, uint32_t* remainder) const {
    const uint32_t quotient = (__umulhi(x, multiplier) + x) >> shift;
    *remainder = x - quotient * divisor;
    return quotient;
  }
};

struct PlanParams {
  const int32_t* source_ids;
  const int32_t* destination_ids;
  int32_t num_ids, num_sources, num_destinations;
  int32_t* times_named;  // per destination; only entries that are named are cleared and read
  int32_t* num_pairs;
  BlockPair* pairs;
  PageErrorRing* errors;
};

__device__ void record(PageErrorRing* ring, PageFault fault, int32_t i, int32_t id, int32_t limit) {
  const unsigned long long slot = atomicAdd(&ring->count, 1ull);
  auto* entry = &ring->entries[slot % PageErrorRing::kEntries];
  entry->fault = fault;
  entry->position = i;
  entry->id = id;
  entry->limit = limit;
  __threadfence_system();
  *reinterpret_cast<volatile unsigned long long*>(&entry->sequence) = slot + 1;
}

enum PlanPhase { kClear = 0, kCount = 1, kSelect = 2 };

__device__ void plan_id(const PlanParams& p, int phase, int32_t i) {
  const int32_t s = p.source_ids[i], d = p.destination_ids[i];
  if (s < 0 || d < 0) return;
  if (s >= p.num_sources) {
    if (phase == kSelect) record(p.errors, PageFault::kSourceOutOfRange, i, s, p.num_sources);
  } else if (d >= p.num_destinations) {
    if (phase == kSelect) {
      record(p.errors, PageFault::kDestinationOutOfRange, i, d, p.num_destinations);
    }
  } else if (phase == kClear) {
    p.times_named[d] = 0;
  } else if (phase == kCount) {
    atomicAdd(&p.times_named[d], 1);
  } else if (__ldcg(&p.times_named[d]) > 1) {
    record(p.errors, PageFault::kDuplicate, i, d, p.num_destinations);
  } else {
    // Order does not matter: no two pairs share a destination.
    p.pairs[atomicAdd(p.num_pairs, 1)] = {s, d};
  }
}

// Phases need a barrier over all ids between them: one block has __syncthreads, many have launches.
template <int kFirst, int kLast>
__global__ void __launch_bounds__(kPlanThreads) plan_pairs(const __grid_constant__ PlanParams p) {
#pragma unroll
  for (int phase = kFirst; phase <= kLast; ++phase) {
    if (phase > kFirst) __syncthreads();
    if (phase == kClear && blockIdx.x == 0 && threadIdx.x == 0) *p.num_pairs = 0;
    for (int32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < p.num_ids;
         i += gridDim.x * blockDim.x) {
      plan_id(p, phase, i);
    }
  }
}

struct CopyParams {
  const int32_t* num_pairs;
  const BlockPair* pairs;
  uint32_t first_pair, last_pair;  // of this launch, as far as there are that many
  int64_t block_bytes, page_stride, stride0, stride1;
  FastDivisor words_per_block, num_buffers, words_per_run, count1;
  std::byte* dense[kMaxBuffers];
  std::byte* strided[kMaxBuffers];
};
static_assert(sizeof(CopyParams) < 32764, "kernel parameters");

// A word of the flat index space: the pair it belongs to, once known, and its place in the block.
struct WordPlace {
  uint32_t buffer, word;
  BlockPair pair;
};

__device__ WordPlace find_word(const CopyParams& p, uint32_t index) {
  WordPlace place;
  const uint32_t block = p.words_per_block.divide(index, &place.word);
  const uint32_t pair = p.num_buffers.divide(block, &place.buffer);
  place.pair = p.pairs[p.first_pair + pair];
  return place;
}

template <typename Word, bool kToDense>
__device__ Word* dense_word(const CopyParams& p, const WordPlace& place) {
  const int64_t block = kToDense ? place.pair.destination : place.pair.source;
  return reinterpret_cast<Word*>(p.dense[place.buffer] + block * p.block_bytes) + place.word;
}

template <typename Word, bool kToDense, bool kSingleRun>
__device__ Word* strided_word(const CopyParams& p, const WordPlace& place) {
  const int64_t page = kToDense ? place.pair.source : place.pair.destination;
  std::byte* block = p.strided[place.buffer] + page * p.page_stride;
  if constexpr (kSingleRun) return reinterpret_cast<Word*>(block) + place.word;
  uint32_t rest, i1;
  const uint32_t i0 = p.count1.divide(p.words_per_run.divide(place.word, &rest), &i1);
  return reinterpret_cast<Word*>(block + i0 * p.stride0 + i1 * p.stride1) + rest;
}

template <typename Word, bool kToDense, bool kSingleRun>
__global__ void __launch_bounds__(kCopyThreads) copy_blocks(const __grid_constant__ CopyParams p) {
  const uint32_t last = min(p.last_pair, static_cast<uint32_t>(*p.num_pairs));
  if (p.first_pair >= last) return;
  const uint32_t total = (last - p.first_pair) * p.num_buffers.divisor * p.words_per_block.divisor;
  const uint32_t threads = gridDim.x * kCopyThreads;
  // 64 bits: the last stride may step past 2^32.
  for (uint64_t first = blockIdx.x * kCopyThreads + threadIdx.x; first < total;
       first += uint64_t{threads} * kWordsInFlight) {
    // Stage by stage over all words, without branches: first all pairs are on their way, then all
    // words. Past the end the last word is read again and not written.
    WordPlace places[kWordsInFlight];
    Word words[kWordsInFlight];
#pragma unroll
    for (int u = 0; u < kWordsInFlight; ++u) {
      const uint64_t index = first + uint64_t{threads} * u;
      places[u] = find_word(p, static_cast<uint32_t>(min(index, uint64_t{total - 1})));
    }
#pragma unroll
    for (int u = 0; u < kWordsInFlight; ++u) {
      words[u] = kToDense ? *strided_word<Word, kToDense, kSingleRun>(p, places[u])
                          : *dense_word<Word, kToDense>(p, places[u]);
    }
#pragma unroll
    for (int u = 0; u < kWordsInFlight; ++u) {
      Word* to = kToDense ? dense_word<Word, kToDense>(p, places[u])
                          : strided_word<Word, kToDense, kSingleRun>(p, places[u]);
      if (first + uint64_t{threads} * u < total) *to = words[u];
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Launchers

ffi::Error launch_plan(cudaStream_t stream, const IdLists& ids, const PairList& list,
                       int32_t* times_named, PageErrorRing* errors) {
  const PlanParams p{
      .source_ids = ids.sources.ids(),
      .destination_ids = ids.destinations.ids(),
      .num_ids = static_cast<int32_t>(ids.sources.size()),
      .num_sources = ids.num_sources,
      .num_destinations = ids.num_destinations,
      .times_named = times_named,
      .num_pairs = list.count,
      .pairs = list.pairs,
      .errors = errors,
  };
  if (p.num_ids <= kPlanOneBlock) {
    plan_pairs<kClear, kSelect><<<1, kPlanThreads, 0, stream>>>(p);
  } else {
    const int blocks = std::min((p.num_ids + kPlanThreads - 1) / kPlanThreads, 64);
    plan_pairs<kClear, kClear><<<blocks, kPlanThreads, 0, stream>>>(p);
    plan_pairs<kCount, kCount><<<blocks, kPlanThreads, 0, stream>>>(p);
    plan_pairs<kSelect, kSelect><<<blocks, kPlanThreads, 0, stream>>>(p);
  }
  JAXKV_CUDA_TRY(cudaGetLastError());
  return ffi::Error::Success();
}

template <typename Word>
void* copy_kernel(bool to_dense, bool single_run) {
  if (to_dense) {
    return single_run ? reinterpret_cast<void*>(copy_blocks<Word, true, true>)
                      : reinterpret_cast<void*>(copy_blocks<Word, true, false>);
  }
  return single_run ? reinterpret_cast<void*>(copy_blocks<Word, false, true>)
                    : reinterpret_cast<void*>(copy_blocks<Word, false, false>);
}

void* copy_kernel(int word_bytes, bool to_dense, bool single_run) {
  switch (word_bytes) {
    case 16:
      return copy_kernel<uint4>(to_dense, single_run);
    case 8:
      return copy_kernel<uint2>(to_dense, single_run);
    case 4:
      return copy_kernel<uint32_t>(to_dense, single_run);
    case 2:
      return copy_kernel<uint16_t>(to_dense, single_run);
    default:
      return copy_kernel<uint8_t>(to_dense, single_run);
  }
}

// The widest word that every address of the copy is a multiple of.
int word_bytes(const BlockCopy& copy) {
  const CopyGeometry& g = copy.geometry;
  uint64_t bits = g.run_bytes | g.stride0 | g.stride1 | g.page_stride;
  for (size_t b = 0; b < copy.dense.size(); ++b) {
    bits |= reinterpret_cast<uintptr_t>(copy.dense[b]);
    bits |= reinterpret_cast<uintptr_t>(copy.strided[b]);
  }
  int width = 16;
  while (bits % width) width /= 2;
  return width;
}

ffi::Error launch_copy(cudaStream_t stream, const BlockCopy& copy, const PairList& list) {
  const CopyGeometry& g = copy.geometry;
  const int width = word_bytes(copy);
  const int64_t block_words = g.block_bytes / width;
  if (block_words >= kMaxWords) {
    return ffi::Error::InvalidArgument("jaxkv page copy: a block of " +
                                       std::to_string(g.block_bytes) + " bytes is too large");
  }
  void* kernel = copy_kernel(width, copy.to_dense, g.single_run());
  const size_t launch_buffers =
      std::min<size_t>(kMaxBuffers, std::max<int64_t>(1, (kMaxWords - 1) / block_words));
  for (size_t b = 0; b < copy.dense.size(); b += launch_buffers) {
    const auto buffers = std::min(launch_buffers, copy.dense.size() - b);
    const int64_t pair_words = block_words * static_cast<int64_t>(buffers);
    const auto launch_pairs = static_cast<size_t>((kMaxWords - 1) / pair_words);
    CopyParams p{
        .num_pairs = list.count,
        .pairs = list.pairs,
        .first_pair = 0,
        .last_pair = 0,
        .block_bytes = g.block_bytes,
        .page_stride = g.page_stride,
        .stride0 = g.stride0,
        .stride1 = g.stride1,
        .words_per_block = FastDivisor(static_cast<uint32_t>(block_words)),
        .num_buffers = FastDivisor(static_cast<uint32_t>(buffers)),
        .words_per_run = FastDivisor(static_cast<uint32_t>(g.run_bytes / width)),
        .count1 = FastDivisor(static_cast<uint32_t>(g.count1)),
        .dense = {},
        .strided = {},
    };
    std::copy_n(copy.dense.begin() + b, buffers, p.dense);
    std::copy_n(copy.strided.begin() + b, buffers, p.strided);
    for (size_t first = 0; first < list.capacity; first += launch_pairs) {
      const size_t last = std::min(list.capacity, first + launch_pairs);
      p.first_pair = static_cast<uint32_t>(first);
      p.last_pair = static_cast<uint32_t>(last);
      const int64_t tile = kCopyThreads * kWordsInFlight;
      const int64_t wanted = (static_cast<int64_t>(last - first) * pair_words + tile - 1) / tile;
      const auto blocks = static_cast<unsigned>(std::min<int64_t>(wanted, copy.num_sms));
      void* arguments[] = {&p};
      JAXKV_CUDA_TRY(
          cudaLaunchKernel(kernel, dim3(blocks), dim3(kCopyThreads), arguments, 0, stream));
    }
  }
  return ffi::Error::Success();
}

// ---------------------------------------------------------------------------------------------
// Handlers

// Everything that may allocate or load a module happens before the first execution.
ffi::Error prepare_device(int32_t device, ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  cudaFuncAttributes attributes;
  for (int width : {1, 2, 4, 8, 16}) {
    for (bool to_dense : {false, true}) {
      for (bool single_run : {false, true}) {
        JAXKV_CUDA_TRY(
            cudaFuncGetAttributes(&attributes, copy_kernel(width, to_dense, single_run)));
      }
    }
  }
  JAXKV_CUDA_TRY(cudaFuncGetAttributes(&attributes, plan_pairs<kClear, kSelect>));
  JAXKV_CUDA_TRY(cudaFuncGetAttributes(&attributes, plan_pairs<kClear, kClear>));
  JAXKV_CUDA_TRY(cudaFuncGetAttributes(&attributes, plan_pairs<kCount, kCount>));
  JAXKV_CUDA_TRY(cudaFuncGetAttributes(&attributes, plan_pairs<kSelect, kSelect>));
  return create_ring(device);
}

ffi::Error plan_on_device(cudaStream_t stream, int32_t device, ffi::Buffer<ffi::S32> source_ids,
                          ffi::Buffer<ffi::S32> destination_ids,
                          ffi::ResultBuffer<ffi::S32> planned, ffi::ResultBuffer<ffi::S32> counts,
                          ffi::Dictionary attributes) {
  const auto ids = decode_ids(source_ids, destination_ids, attributes);
  if (!ids.has_value()) return ids.error();
  const auto list = decode_pairs(*planned);
  if (!list.has_value()) return list.error();
  if (list->capacity < ids->sources.size() ||
      counts->element_count() < static_cast<size_t>(ids->num_destinations)) {
    return ffi::Error::InvalidArgument("jaxkv page copy: results of the plan are too small");
  }
  return launch_plan(stream, *ids, *list, counts->typed_data(), device_rings[device].load());
}

ffi::Error copy_by_kernel(cudaStream_t stream, ffi::Buffer<ffi::S32> planned,
                          ffi::RemainingArgs args, ffi::RemainingRets rets,
                          ffi::Dictionary attributes) {
  const auto copy = decode_copy(args, rets, attributes);
  if (!copy.has_value()) return copy.error();
  const auto list = decode_pairs(planned);
  if (!list.has_value()) return list.error();
  return launch_copy(stream, *copy, *list);
}

// The negative control of the ordering tests: plan and copy on a stream that waits for nothing, and
// with memory of their own, since XLA's may belong to work that still runs.
ffi::Error copy_unordered(cudaStream_t, int32_t device, ffi::Buffer<ffi::S32> source_ids,
                          ffi::Buffer<ffi::S32> destination_ids, ffi::RemainingArgs args,
                          ffi::RemainingRets rets, ffi::Dictionary attributes) {
  const auto copy = decode_copy(args, rets, attributes);
  if (!copy.has_value()) return copy.error();
  const auto ids = decode_ids(source_ids, destination_ids, attributes);
  if (!ids.has_value()) return ids.error();
  static std::array<cudaStream_t, kMaxDevices> streams{};
  cudaStream_t& stream = streams[device];
  if (!stream) JAXKV_CUDA_TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const size_t num_ids = ids->sources.size(), num_counts = ids->num_destinations;
  int32_t* words = nullptr;
  JAXKV_CUDA_TRY(cudaMallocAsync(&words, (2 + 2 * num_ids + num_counts) * sizeof *words, stream));
  const PairList list{words, reinterpret_cast<BlockPair*>(words + 2), num_ids};
  auto error =
      launch_plan(stream, *ids, list, words + 2 + 2 * num_ids, device_rings[device].load());
  if (error.success()) error = launch_copy(stream, *copy, list);
  JAXKV_CUDA_TRY(cudaFreeAsync(words, stream));
  return error;
}

}  // namespace

using Stream = ffi::PlatformStream<cudaStream_t>;
using Int32s = ffi::Buffer<ffi::S32>;

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    PrepareDevice, prepare_device,
    ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(PlanPairsKernel, plan_on_device,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<Int32s>()
                                  .Arg<Int32s>()
                                  .Ret<Int32s>()
                                  .Ret<Int32s>()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CopyBlocksKernel, copy_by_kernel,
    ffi::Ffi::Bind().Ctx<Stream>().Arg<Int32s>().RemainingArgs().RemainingRets().Attrs(),
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(CopyBlocksUnordered, copy_unordered,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<Int32s>()
                                  .Arg<Int32s>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs());

}  // namespace jaxkv
