// The copy kernel: moves the words of all buffers in one flat index space, so that its rate does
// not depend on the page size. Each thread block copies one stretch of that space, and checks the
// ids that it needs or stages the checked pairs in shared memory.
#pragma once

#include "transfer/copy_kernel.h"
#include "transfer/id_check.cuh"

namespace jaxkv::transfer {
namespace {

constexpr int kMaxBuffers = kMaxSegmentBuffers;  // 4 KiB of kernel parameters ...
constexpr int kFewBuffers = 8;  // ... whose transfer would delay a copy of one page
constexpr int kCopyThreads = 1024;
constexpr int kIdsInFlight = 4;           // in addition to the words of a Window
constexpr uint32_t kAlignedWords = 64;    // stretches start at multiples: full cache lines
constexpr uint32_t kMaxWords = 1u << 31;  // range of FastDivisor

// Division by multiplication, for x < 2^31.
struct FastDivisor {
  uint32_t divisor, multiplier, shift;

  FastDivisor() = default;
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

// Limit for copies of ids in shared memory: what shared memory takes of an SM reduces its L1 cache,
// which buffers the loads in flight.
constexpr uint32_t kMaxSharedForIds = 160 * 1024;

struct CopyParams {
  IdParams ids;  // unchecked ids, or ...
  ShareSize share{0};
  const BlockPair* pairs;  // ... checked pairs if not null
  const int32_t* num_pairs;
  uint32_t first_pair, last_pair;  // of this launch, limited by the number of pairs
  int64_t dense_stride, page_stride, stride0, stride1;
  FastDivisor words_per_block, segment_buffers, words_per_run, count1;
  uint32_t num_segments;
  uint32_t* counter;  // of SegmentProgress; null without progress signals
  uint32_t* arrived;
  uint32_t first_signal;

  __host__ __device__ uint32_t words_per_pair() const {
    return segment_buffers.divisor * words_per_block.divisor;
  }
};

// The widest word for which all addresses and strides of the copy are aligned.
inline int word_bytes(const BlockCopy& copy) {
  const CopyGeometry& g = copy.geometry;
  uint64_t bits = g.run_bytes | g.stride0 | g.stride1 | g.page_stride | g.dense_stride;
  for (size_t b = 0; b < copy.dense.size(); ++b) {
    bits |= reinterpret_cast<uintptr_t>(copy.dense[b]);
    bits |= reinterpret_cast<uintptr_t>(copy.strided[b]);
  }
  int width = 16;
  while (bits % width) width /= 2;
  return width;
}

// The pairs of a launch: unchecked ids, or a checked list.
struct Pairs {
  IdParams ids{};
  PairList list{};
  size_t capacity;
};

// Of a checked list; of the ids only the limits.
inline Pairs checked_pairs(const BlockCopy& copy, const PairList& list) {
  const auto num_dense = static_cast<int32_t>(copy.geometry.num_dense);
  const auto num_strided = static_cast<int32_t>(copy.geometry.num_strided);
  Pairs pairs{{}, list, list.capacity};
  pairs.ids.num_sources = copy.to_dense ? num_strided : num_dense;
  pairs.ids.num_destinations = copy.to_dense ? num_dense : num_strided;
  return pairs;
}

// The parameters of a copy of `buffers` buffers of one segment, and of all pairs.
inline CopyParams copy_params(const CopyGeometry& g, const Pairs& pairs, int width,
                              size_t buffers) {
  return {
      .ids = pairs.ids,
      .pairs = pairs.list.pairs,
      .num_pairs = pairs.list.count,
      .first_pair = 0,
      .last_pair = static_cast<uint32_t>(pairs.capacity),
      .dense_stride = g.dense_stride,
      .page_stride = g.page_stride,
      .stride0 = g.stride0,
      .stride1 = g.stride1,
      .words_per_block = FastDivisor(static_cast<uint32_t>(g.block_bytes / width)),
      .segment_buffers = FastDivisor(static_cast<uint32_t>(buffers)),
      .words_per_run = FastDivisor(static_cast<uint32_t>(g.run_bytes / width)),
      .count1 = FastDivisor(static_cast<uint32_t>(g.count1)),
      .num_segments = 1,
      .counter = nullptr,
      .arrived = nullptr,
      .first_signal = 0,
  };
}

template <int kBuffers>
struct CopyParamsOf : CopyParams {
  std::byte* dense[kBuffers];
  std::byte* strided[kBuffers];

  static constexpr int kWordsInFlight = 4;  // loads per thread: PCIe latency is ~1 us
  static constexpr int kPlacesAtOnce = 2;   // computed together, as far as registers allow

  __device__ const CopyParamsOf& reloaded() const { return *this; }
  __device__ const CopyParams& params() const { return *this; }
  __device__ std::byte* dense_buffer(uint32_t buffer) const { return dense[buffer]; }
  __device__ std::byte* strided_buffer(uint32_t buffer) const { return strided[buffer]; }
};
static_assert(sizeof(CopyParamsOf<kMaxBuffers>) < 32764, "kernel parameters");

// Words of a segment per thread block.
__host__ __device__ uint32_t stretch_of(uint32_t words, uint32_t blocks) {
  const uint32_t unit = blocks * kAlignedWords;
  return (words + unit - 1) / unit * kAlignedWords;
}

// What a thread block copies of each segment: a range of words in the flat index space, which
// starts at pair `first_pair` of the launch, and the pairs of those words.
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

// A word of the flat index space: its position in the block, and its pair.
struct WordPlace {
  uint32_t buffer, word;
  BlockPair pair;
};

// `pairs` points to the pair of index 0, even if that is not part of this block's work.
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
  std::byte* first = p.dense_buffer(place.buffer);
  return reinterpret_cast<Word*>(first + block * p.params().dense_stride) + place.word;
}

template <typename Word, bool kSingleRun>
__device__ Word* strided_word(const auto& source, const WordPlace& place, int32_t page) {
  const CopyParams& p = source.params();
  std::byte* block = source.strided_buffer(place.buffer) + page * p.page_stride;
  if constexpr (kSingleRun) return reinterpret_cast<Word*>(block) + place.word;
  uint32_t rest, i1;
  const uint32_t i0 = p.count1.divide(p.words_per_run.divide(place.word, &rest), &i1);
  return reinterpret_cast<Word*>(block + i0 * p.stride0 + i1 * p.stride1) + rest;
}

// Sliding window of a thread's loads in flight, one word for each of kWordsInFlight strides.
// `Params` are the parameters and buffers of the copy.
template <typename Params, typename Word, bool kToDense, bool kSingleRun>
class Window {
 public:
  __device__ explicit Window(const Params& p) : p_(p) {}

  // Issues the first loads of a segment.
  __device__ void open(const Work& work, const BlockPair* pairs, uint32_t segment) {
    first_ = work.words.first + threadIdx.x;
    if (work.words.size() > 0) step<false>(work, pairs, segment);
  }
  // Stores the loaded words, and copies the rest of the thread block's words of the segment.
  __device__ void run(const Work& work, const BlockPair* pairs, uint32_t segment) {
    while (first_ < work.words.last) {
      first_ += kCopyThreads * kWordsInFlight;
      step<true>(work, pairs, segment);
    }
  }

 private:
  static constexpr int kWordsInFlight = Params::kWordsInFlight;
  static constexpr int kPlacesAtOnce = Params::kPlacesAtOnce;

  // Issues the loads at first_. Each word that has arrived is stored and replaced by the next load,
  // so that the number of loads in flight stays constant.
  template <bool kStore>
  __device__ void step(const Work& work, const BlockPair* pairs, uint32_t segment) {
#pragma unroll
    for (int group = 0; group < kWordsInFlight; group += kPlacesAtOnce) {
      const auto& p = p_.reloaded();
      const Word* from[kPlacesAtOnce];
      Word* to[kPlacesAtOnce];
#pragma unroll
      for (int u = 0; u < kPlacesAtOnce; ++u) {
        const uint32_t index = first_ + (group + u) * kCopyThreads;
        find(p, work, pairs, segment, index, &from[u], &to[u]);
      }
#pragma unroll
      for (int u = 0; u < kPlacesAtOnce; ++u) {
        if (kStore && to_[group + u]) *to_[group + u] = words_[group + u];
        to_[group + u] = to[u];
        if (to[u]) words_[group + u] = __ldcs(from[u]);
      }
    }
  }
  // Branch-free, so that several pairs are read concurrently. `to` is null if there is nothing to
  // copy.
  __device__ static void find(const auto& p, const Work& work, const BlockPair* pairs,
                              uint32_t segment, uint32_t index, const Word** from, Word** to) {
    const auto place = find_word(p.params(), pairs, segment, min(index, work.words.last - 1));
    const auto [source, destination] = place.pair;
    Word* dense = dense_word<Word>(p, place, kToDense ? destination : source);
    Word* strided = strided_word<Word, kSingleRun>(p, place, kToDense ? source : destination);
    const bool wanted = index < work.words.last && destination >= 0;
    *from = kToDense ? strided : dense;
    *to = wanted ? (kToDense ? dense : strided) : nullptr;
  }

  const Params& p_;
  uint32_t first_ = 0;
  Word words_[kWordsInFlight];
  Word* to_[kWordsInFlight];
};

// Signals the end of this block's part of a segment; the last block to do so advances the counter.
// The counter never decreases, because each block arrives here only after its signal for the
// previous segment.
__device__ void signal(const CopyParams& p, uint32_t segment) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence_system();
  if (atomicAdd(&p.arrived[segment], 1u) + 1 < gridDim.x) return;
  p.arrived[segment] = 0;
  __threadfence_system();
  *static_cast<volatile uint32_t*>(p.counter) = p.first_signal + segment;
}

// Lists this thread block's pairs in shared memory and issues its first loads. `work_of(count)` is
// its work if there are `count` pairs. Returns a pointer to the pair of index 0.
template <typename WorkOf>
__device__ const BlockPair* open(const CopyParams& p, auto is_first, WorkOf work_of, auto& window,
                                 Work& work, std::byte* shared) {
  const BlockPair* pairs;
  auto* listed = reinterpret_cast<BlockPair*>(shared);
  Share<kIdsInFlight> share(p.ids, p.share, shared);
  const bool few = p.ids.num_ids <= kFewIds;
  if (p.pairs) {
    work = work_of(static_cast<uint32_t>(*p.num_pairs));
    stage(p.ids, p.pairs, work.claim.pairs, listed);
    pairs = listed + p.first_pair - work.claim.pairs.first;
  } else if (few) {
    work = work_of(list_few(p.ids, is_first(), listed));
    pairs = listed + p.first_pair;
  } else {
    work = work_of(p.ids.num_ids);
    share.list(work.claim.pairs);
    pairs = share.pairs() + p.first_pair - work.claim.pairs.first;
  }
  // The first loads overlap the check of many ids: only addresses in range are read.
  window.open(work, pairs, 0);
  if (p.pairs || few || share.all_valid()) return pairs;
  auto claim_of = [&](uint32_t count) { return (work = work_of(count)).claim; };
  share.regroup(is_first(), claim_of);
  pairs = share.pairs() + p.first_pair - work.claim.pairs.first;
  window.open(work, pairs, 0);
  return pairs;
}

template <int kBuffers, typename Word, bool kToDense, bool kSingleRun>
__global__ void __launch_bounds__(kCopyThreads)
    copy_blocks(const __grid_constant__ CopyParamsOf<kBuffers> p) {
  extern __shared__ __align__(16) std::byte shared[];
  Window<CopyParamsOf<kBuffers>, Word, kToDense, kSingleRun> window(p);
  Work work;
  auto work_of = [&](uint32_t num_pairs) { return work_of_block(p, num_pairs); };
  auto is_first = [&] { return blockIdx.x == 0 && p.first_pair == 0; };
  const BlockPair* pairs = open(p, is_first, work_of, window, work, shared);
  for (uint32_t segment = 0; segment < p.num_segments; ++segment) {
    window.run(work, pairs, segment);
    if (segment + 1 < p.num_segments) window.open(work, pairs, segment + 1);
    if (p.counter) signal(p, segment);
  }
}

}  // namespace
}  // namespace jaxkv::transfer
