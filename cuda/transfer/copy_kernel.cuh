// The copy kernel: moves all buffers' words in one flat index space, so that the rate does not
// depend on the size of a page. Each thread block takes one stretch of it, and checks the ids that
// it needs or brings the pairs that were checked to shared memory.
#pragma once

#include "transfer/copy_kernel.h"
#include "transfer/id_check.cuh"

namespace jaxkv::transfer {
namespace {

constexpr int kMaxBuffers = 256;  // 4 KiB of kernel parameters, ...
constexpr int kFewBuffers = 8;    // ... which a copy of one page would wait for
constexpr int kCopyThreads = 1024;
constexpr int kWordsInFlight = 4;         // loads of a thread: PCIe latency is ~1 us
constexpr int kIdsInFlight = 4;           // beside those words, likewise
constexpr int kPlacesAtOnce = 2;          // found side by side, as far as registers go
constexpr uint32_t kAlignedWords = 64;    // a stretch starts at a multiple, to keep lines whole
constexpr uint32_t kMaxWords = 1u << 31;  // FastDivisor's range

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
    Share<kIdsInFlight> share(p.ids, p.share, shared);
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

}  // namespace
}  // namespace jaxkv::transfer
