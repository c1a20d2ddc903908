// Moves all buffers' words in one flat index space, so that the rate does not depend on the size of
// a page. Each thread block takes one stretch of it, and checks the ids that it needs.
#include <algorithm>
#include <array>
#include <atomic>
#include <string>

#include "copy_kernel.h"
#include "cuda_check.h"
#include "id_check.cuh"

namespace jaxkv {
namespace {

static_assert(kInlineIds == ShareSize::kMaxCapacity, "one thread block may have to list them all");

constexpr int kMaxBuffers = 256;  // 4 KiB of kernel parameters, ...
constexpr int kFewBuffers = 8;    // ... which a copy of one page would wait for
constexpr int kCopyThreads = 1024;
constexpr int kWordsInFlight = 4;         // loads of a thread: PCIe latency is ~1 us
constexpr int kPlacesAtOnce = 2;          // found side by side, as far as registers go
constexpr uint32_t kAlignedWords = 64;    // a stretch starts at a multiple, to keep lines whole
constexpr uint32_t kMaxWords = 1u << 31;  // FastDivisor's range

// ---------------------------------------------------------------------------------------------
// Kernel

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

struct CopyParams {
  IdParams ids;  // to be checked here, or ...
  ShareSize share{0};
  const BlockPair* pairs;  // ... checked before, if not null
  const int32_t* num_pairs;
  uint32_t first_pair, last_pair;  // of this launch, as far as there are that many
  int64_t block_bytes, page_stride, stride0, stride1;
  FastDivisor words_per_block, segment_buffers, words_per_run, count1;
  uint32_t num_segments;
  uint32_t* counter;  // of Progress; null without it
  uint32_t* arrived;
  uint32_t first_signal;

  __host__ __device__ uint32_t words_per_pair() const {
    return segment_buffers.divisor * words_per_block.divisor;
  }
};

template <int kBuffers>
struct CopyParamsOf : CopyParams {
  std::byte* dense[kBuffers];
  std::byte* strided[kBuffers];
};
static_assert(sizeof(CopyParamsOf<kMaxBuffers>) < 32764, "kernel parameters");

// Words of a segment that each of so many thread blocks copies.
__host__ __device__ uint32_t stretch_of(uint32_t words, uint32_t blocks) {
  const uint32_t unit = blocks * kAlignedWords;
  return (words + unit - 1) / unit * kAlignedWords;
}

// What a thread block copies of each segment: words of the flat index space (from pair `first_pair`
// of the launch on), and the pairs that they belong to.
struct Work {
  Span words;
  Claim claim;
};

__device__ Work work_of_block(const CopyParams& p, uint32_t num_pairs) {
  const uint32_t last_pair = min(p.last_pair, num_pairs);
  const uint32_t pairs = last_pair > p.first_pair ? last_pair - p.first_pair : 0;
  const uint32_t per_pair = p.words_per_pair();
  const uint32_t total = pairs * per_pair;
  const uint32_t stretch = stretch_of(total, gridDim.x);
  const Span words{min(blockIdx.x * stretch, total), min((blockIdx.x + 1) * stretch, total)};
  if (words.size() == 0) return {words, {}};
  const Span own{p.first_pair + words.first / per_pair,
                 p.first_pair + (words.last - 1) / per_pair + 1};
  return {words, {own, words.first % per_pair != 0}};
}

// A word of the flat index space: its place in the block, and once known the pair it belongs to.
struct WordPlace {
  uint32_t buffer, word;
  BlockPair pair;
};

// `pairs` points at the pair of index 0, or would if it were of this block's work.
__device__ WordPlace find_word(const CopyParams& p, const BlockPair* pairs, uint32_t segment,
                               uint32_t index) {
  WordPlace place;
  const uint32_t block = p.words_per_block.divide(index, &place.word);
  place.pair = pairs[p.segment_buffers.divide(block, &place.buffer)];
  place.buffer += segment * p.segment_buffers.divisor;
  return place;
}

template <typename Word>
__device__ Word* dense_word(const auto& p, const WordPlace& place, int32_t block) {
  return reinterpret_cast<Word*>(p.dense[place.buffer] + block * p.block_bytes) + place.word;
}

template <typename Word, bool kSingleRun>
__device__ Word* strided_word(const auto& p, const WordPlace& place, int32_t page) {
  std::byte* block = p.strided[place.buffer] + page * p.page_stride;
  if constexpr (kSingleRun) return reinterpret_cast<Word*>(block) + place.word;
  uint32_t rest, i1;
  const uint32_t i0 = p.count1.divide(p.words_per_run.divide(place.word, &rest), &i1);
  return reinterpret_cast<Word*>(block + i0 * p.stride0 + i1 * p.stride1) + rest;
}

// The words that a thread has on their way, one of each kWordsInFlight strides of the block.
template <typename Params, typename Word, bool kToDense, bool kSingleRun>
class Window {
 public:
  __device__ explicit Window(const Params& p) : p_(p) {}

  // Starts the first words of a segment.
  __device__ void open(const Work& work, const BlockPair* pairs, uint32_t segment) {
    first_ = work.words.first + threadIdx.x;
    if (work.words.size() > 0) step<false>(work, pairs, segment);
  }
  // Copies what open started, and the rest of the block's words of the segment.
  __device__ void run(const Work& work, const BlockPair* pairs, uint32_t segment) {
    while (first_ < work.words.last) {
      first_ += kCopyThreads * kWordsInFlight;
      step<true>(work, pairs, segment);
    }
  }

 private:
  // Starts the words at first_. Each that is here makes room for the next, so that as many loads
  // stay on their way.
  template <bool kStore>
  __device__ void step(const Work& work, const BlockPair* pairs, uint32_t segment) {
#pragma unroll
    for (int group = 0; group < kWordsInFlight; group += kPlacesAtOnce) {
      const Word* from[kPlacesAtOnce];
      Word* to[kPlacesAtOnce];
#pragma unroll
      for (int u = 0; u < kPlacesAtOnce; ++u) {
        const uint32_t index = first_ + (group + u) * kCopyThreads;
        find(work, pairs, segment, index, &from[u], &to[u]);
      }
#pragma unroll
      for (int u = 0; u < kPlacesAtOnce; ++u) {
        if (kStore && to_[group + u]) *to_[group + u] = words_[group + u];
        to_[group + u] = to[u];
        if (to[u]) words_[group + u] = __ldcs(from[u]);
      }
    }
  }
  // Without branches, so that several pairs are read side by side. `to` is null if there is nothing
  // to copy.
  __device__ void find(const Work& work, const BlockPair* pairs, uint32_t segment, uint32_t index,
                       const Word** from, Word** to) const {
    const auto place = find_word(p_, pairs, segment, min(index, work.words.last - 1));
    const auto [source, destination] = place.pair;
    Word* dense = dense_word<Word>(p_, place, kToDense ? destination : source);
    Word* strided = strided_word<Word, kSingleRun>(p_, place, kToDense ? source : destination);
    const bool wanted = index < work.words.last && destination >= 0;
    *from = kToDense ? strided : dense;
    *to = wanted ? (kToDense ? dense : strided) : nullptr;
  }

  const Params& p_;
  uint32_t first_ = 0;
  Word words_[kWordsInFlight];
  Word* to_[kWordsInFlight];
};

// Says that this block's part of a segment is copied; the last block to say so tells who waits. As
// a block comes here only after it has told what it had to tell of the segment before, the counter
// never goes back.
__device__ void signal(const CopyParams& p, uint32_t segment) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence_system();
  if (atomicAdd(&p.arrived[segment], 1u) + 1 < gridDim.x) return;
  p.arrived[segment] = 0;
  __threadfence_system();
  *static_cast<volatile uint32_t*>(p.counter) = p.first_signal + segment;
}

// Brings pairs to where no load from the host is before them.
__device__ void stage(const BlockPair* pairs, Span span, BlockPair* staged) {
  for (uint32_t k = threadIdx.x; k < span.size(); k += kCopyThreads) {
    staged[k] = pairs[span.first + k];
  }
  __syncthreads();
}

template <int kBuffers, typename Word, bool kToDense, bool kSingleRun>
__global__ void __launch_bounds__(kCopyThreads)
    copy_blocks(const __grid_constant__ CopyParamsOf<kBuffers> p) {
  extern __shared__ __align__(16) std::byte shared[];
  Window<CopyParamsOf<kBuffers>, Word, kToDense, kSingleRun> window(p);
  Work work;
  const BlockPair* pairs;
  if (p.pairs) {
    work = work_of_block(p, static_cast<uint32_t>(*p.num_pairs));
    auto* staged = reinterpret_cast<BlockPair*>(shared);
    stage(p.pairs, work.claim.pairs, staged);
    pairs = staged + p.first_pair - work.claim.pairs.first;
    window.open(work, pairs, 0);
  } else {
    Share share(p.ids, p.share, shared);
    work = work_of_block(p, p.ids.num_ids);
    share.list(work.claim.pairs);
    pairs = share.pairs() + p.first_pair - work.claim.pairs.first;
    // The first words are on their way while the ids are checked: what is read is in range.
    window.open(work, pairs, 0);
    if (!share.all_good()) {
      auto claim_of = [&](uint32_t count) { return (work = work_of_block(p, count)).claim; };
      share.regroup(blockIdx.x == 0 && p.first_pair == 0, claim_of);
      pairs = share.pairs() + p.first_pair - work.claim.pairs.first;
      window.open(work, pairs, 0);
    }
  }
  for (uint32_t segment = 0; segment < p.num_segments; ++segment) {
    window.run(work, pairs, segment);
    if (segment + 1 < p.num_segments) window.open(work, pairs, segment + 1);
    if (p.counter) signal(p, segment);
  }
}

// ---------------------------------------------------------------------------------------------
// Launchers

template <int kBuffers, typename Word>
void* copy_kernel(bool to_dense, bool single_run) {
  if (to_dense) {
    return single_run ? reinterpret_cast<void*>(copy_blocks<kBuffers, Word, true, true>)
                      : reinterpret_cast<void*>(copy_blocks<kBuffers, Word, true, false>);
  }
  return single_run ? reinterpret_cast<void*>(copy_blocks<kBuffers, Word, false, true>)
                    : reinterpret_cast<void*>(copy_blocks<kBuffers, Word, false, false>);
}

// What a copy asks of a kernel.
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

ffi::Error invalid(const std::string& message) {
  return ffi::Error::InvalidArgument("jaxkv page copy: " + message);
}

// The pairs of a launch: ids to be checked, or a list that was.
struct Pairs {
  IdParams ids{};
  PairList list{};
  size_t capacity;
};

// One launch: segments of whole buffers, pairs [p.first_pair, p.last_pair).
ffi::Error launch(cudaStream_t stream, const BlockCopy& copy, Variant variant,
                  CopyParamsOf<kMaxBuffers>& p) {
  const uint64_t words = uint64_t{p.last_pair - p.first_pair} * p.words_per_pair();
  const uint64_t wanted = std::max<uint64_t>(1, (words + kCopyThreads - 1) / kCopyThreads);
  const auto blocks = static_cast<uint32_t>(std::min<uint64_t>(wanted, copy.num_sms));
  const uint32_t stretch = stretch_of(static_cast<uint32_t>(words), blocks);
  // A stretch may begin and end within a pair.
  const uint32_t most = std::min(p.last_pair - p.first_pair, stretch / p.words_per_pair() + 2);
  p.share = ShareSize(most, p.ids.num_ids);
  const uint32_t shared_bytes =
      p.pairs ? most * static_cast<uint32_t>(sizeof(BlockPair)) : p.share.bytes();
  CopyParamsOf<kFewBuffers> few{p, {}, {}};
  if (variant.few_buffers) {
    std::copy_n(p.dense, kFewBuffers, few.dense);
    std::copy_n(p.strided, kFewBuffers, few.strided);
  }
  void* arguments[] = {variant.few_buffers ? static_cast<void*>(&few) : &p};
  JAXKV_CUDA_TRY(cudaLaunchKernel(copy_kernel(variant), dim3(blocks), dim3(kCopyThreads), arguments,
                                  shared_bytes, stream));
  return ffi::Error::Success();
}

ffi::Error launch_all(cudaStream_t stream, const BlockCopy& copy, const Pairs& pairs,
                      const Progress* progress) {
  const CopyGeometry& g = copy.geometry;
  const int width = word_bytes(copy);
  const int64_t block_words = g.block_bytes / width;
  if (block_words >= kMaxWords) {
    return invalid("a block of " + std::to_string(g.block_bytes) + " bytes is too large");
  }
  const auto most_buffers =
      std::min<size_t>(kMaxBuffers, std::max<int64_t>(1, (kMaxWords - 1) / block_words));
  const size_t num_buffers = copy.dense.size();
  const size_t segment_buffers =
      progress ? progress->segment_buffers : std::min(most_buffers, num_buffers);
  if (segment_buffers > most_buffers) {
    return invalid("a segment of " + std::to_string(segment_buffers) + " buffers is too large");
  }
  // A block stages the pairs that it was given, and those of a stretch's two ends.
  const size_t staged_pairs =
      pairs.list.pairs ? copy.num_sms * size_t{ShareSize::kMaxCapacity - 2 * kAlignedWords}
                       : pairs.capacity;
  // Segments of a launch: with Progress as many as fit, unless each takes several launches.
  const size_t most_segments =
      progress && pairs.capacity <= staged_pairs ? kMaxBuffers / segment_buffers : 1;
  size_t buffers = 0;
  for (size_t b = 0; b < num_buffers; b += buffers) {
    buffers = std::min(most_segments * segment_buffers, num_buffers - b);
    const size_t of_segment = std::min(buffers, segment_buffers);
    const Variant variant{width, copy.to_dense, g.single_run(),
                          width == 16 && buffers <= kFewBuffers};
    CopyParamsOf<kMaxBuffers> p{
        {
            .ids = pairs.ids,
            .pairs = pairs.list.pairs,
            .num_pairs = pairs.list.count,
            .first_pair = 0,
            .last_pair = 0,
            .block_bytes = g.block_bytes,
            .page_stride = g.page_stride,
            .stride0 = g.stride0,
            .stride1 = g.stride1,
            .words_per_block = FastDivisor(static_cast<uint32_t>(block_words)),
            .segment_buffers = FastDivisor(static_cast<uint32_t>(of_segment)),
            .words_per_run = FastDivisor(static_cast<uint32_t>(g.run_bytes / width)),
            .count1 = FastDivisor(static_cast<uint32_t>(g.count1)),
            .num_segments = static_cast<uint32_t>(buffers / of_segment),
            .counter = nullptr,
            .arrived = nullptr,
            .first_signal = 0,
        },
        {},
        {}};
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
                       PageErrorRing* errors) {
  if (ids.sources.size() > kInlineIds) {
    return invalid(std::to_string(ids.sources.size()) + " ids in one launch, at most " +
                   std::to_string(kInlineIds));
  }
  return launch_all(stream, copy, {id_params(ids, errors), {}, ids.sources.size()}, nullptr);
}

ffi::Error launch_copy(cudaStream_t stream, const BlockCopy& copy, const PairList& list,
                       const Progress* progress) {
  return launch_all(stream, copy, {{}, list, list.capacity}, progress);
}

ffi::Error prepare_copy_kernel(int32_t device) {
  static std::array<std::atomic<bool>, kMaxDevices> done{};  // XLA asks before every execution
  if (auto error = prepare_ring(device); error.failure()) return error;
  if (done[device].load()) return ffi::Error::Success();
  int most_shared = 0;
  JAXKV_CUDA_TRY(
      cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  for (void* kernel : all_copy_kernels()) {
    cudaFuncAttributes attributes;
    JAXKV_CUDA_TRY(cudaFuncGetAttributes(&attributes, kernel));
    const int most = most_shared - static_cast<int>(attributes.sharedSizeBytes);
    JAXKV_CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        std::min(most, kMaxShareBytes)));
  }
  done[device].store(true);
  return ffi::Error::Success();
}

}  // namespace jaxkv
