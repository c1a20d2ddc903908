// The check of the ids, which every thread block makes for itself: no launch, no scratch memory.
//
// A block answers for a stretch of the pairs, its share. It lists the share in shared memory, the
// destinations also in a hash set, and holds all ids against that set: who names a destination of
// the share from outside is found that way, and the owner of the outside finds the other.
// As long as every entry is good, pair i is entry i. If one is not, blocks cannot tell each other,
// but all read the same list: pair i is then the i-th entry in range (regroup).
#pragma once

#include <algorithm>
#include <bit>

#include "page_errors.cuh"
#include "transfer.h"

namespace jaxkv {

struct IdParams {
  const int32_t* sources;
  const int32_t* destinations;
  uint32_t num_ids;
  int32_t num_sources, num_destinations;
  PageErrorRing* errors;  // null where another launch records them
};

inline IdParams id_params(const IdLists& ids, PageErrorRing* errors) {
  return {ids.sources.ids(), ids.destinations.ids(), static_cast<uint32_t>(ids.sources.size()),
          ids.num_sources,   ids.num_destinations,   errors};
}

struct Span {
  uint32_t first, last;

  __host__ __device__ uint32_t size() const { return last - first; }
  __device__ bool has(uint32_t i) const { return first <= i && i < last; }
};

// The pairs that a block answers for.
struct Claim {
  Span pairs;
  bool first_is_shared;  // with the block before, which records what is wrong with it
};

// Shared memory of a share of up to `capacity` pairs, and of `num_ids` destinations if the ids are
// read once: loads from the host that are under way would hold up those of ids behind them.
struct ShareSize {
  static constexpr uint32_t kMaxCapacity = 12 * 1024;
  static constexpr uint32_t kMaxSlots = 16 * 1024;

  uint32_t capacity, log2_slots, num_ids;

  // Few keys in many slots, as nearly every look-up is to find nothing.
  explicit ShareSize(uint32_t pairs, uint32_t ids = 0)
      : capacity(pairs),
        log2_slots(std::bit_width(std::clamp(4 * pairs, 32u, kMaxSlots) - 1)),
        num_ids(ids) {}
  __host__ __device__ uint32_t slots() const { return 1u << log2_slots; }
  uint32_t bytes() const {
    return capacity * sizeof(BlockPair) + (slots() + num_ids) * sizeof(uint32_t);
  }
};
constexpr int kMaxShareBytes = ShareSize::kMaxCapacity * (sizeof(BlockPair) + sizeof(int32_t)) +
                               ShareSize::kMaxSlots * sizeof(uint32_t);

#ifdef __CUDACC__

// What stands for an entry that is not to be copied: reading block 0 does no harm.
inline constexpr BlockPair kNoPair{0, -1};

// Destinations by open addressing. A key that is marked was named more than once.
class DestinationSet {
 public:
  __device__ DestinationSet(uint32_t* slots, uint32_t log2_slots)
      : slots_(slots), log2_slots_(log2_slots) {}

  __device__ void clear() {
    for (uint32_t slot = threadIdx.x; slot < 1u << log2_slots_; slot += blockDim.x) {
      slots_[slot] = kEmpty;
    }
  }
  // Adds a key, or marks it if it is there. Returns whether it was.
  __device__ bool add(uint32_t key) {
    for (uint32_t slot = home(key);; slot = next(slot)) {
      const uint32_t old = atomicCAS(&slots_[slot], kEmpty, key);
      if (old == kEmpty) return false;
      if ((old & ~kMark) != key) continue;
      atomicOr(&slots_[slot], kMark);
      return true;
    }
  }
  // Marks a key if it is there. Returns whether it was.
  __device__ bool mark(uint32_t key) {
    for (uint32_t slot = home(key);; slot = next(slot)) {
      const uint32_t old = volatile_slot(slot);
      if (old == kEmpty) return false;
      if ((old & ~kMark) != key) continue;
      atomicOr(&slots_[slot], kMark);
      return true;
    }
  }
  __device__ bool is_marked(uint32_t key) const {
    uint32_t slot = home(key);
    while ((slots_[slot] & ~kMark) != key) slot = next(slot);
    return slots_[slot] & kMark;
  }

 private:
  static constexpr uint32_t kMark = 1u << 31;
  static constexpr uint32_t kEmpty = ~0u;  // no key: a destination is below 2^31 - 1

  __device__ uint32_t home(uint32_t key) const { return key * 0x9e3779b1u >> (32 - log2_slots_); }
  __device__ uint32_t next(uint32_t slot) const { return (slot + 1) & ((1u << log2_slots_) - 1); }
  __device__ uint32_t volatile_slot(uint32_t slot) const {
    return static_cast<volatile uint32_t*>(slots_)[slot];
  }

  uint32_t* slots_;
  uint32_t log2_slots_;
};

// A block's share of the pairs. All members are called by all threads of the block.
class Share {
 public:
  __device__ Share(const IdParams& ids, const ShareSize& size, std::byte* shared)
      : ids_(ids),
        pairs_(reinterpret_cast<BlockPair*>(shared)),
        set_(reinterpret_cast<uint32_t*>(pairs_ + size.capacity), size.log2_slots),
        named_(size.num_ids ? reinterpret_cast<int32_t*>(pairs_ + size.capacity) + size.slots()
                            : nullptr) {}

  // Pairs of the share; kNoPair among them are to be skipped.
  __device__ const BlockPair* pairs() const { return pairs_; }

  // Lists pairs [span.first, span.last) as if every entry were good.
  __device__ void list(Span span) {
    set_.clear();
    __syncthreads();
    entries_ = span;
    twins_ = false;
    const Span read_now = named_ ? Span{0, ids_.num_ids} : span;
    for_entries(read_now, [&](uint32_t i, BlockPair entry) {
      if (named_) named_[i] = destination_of(entry);
      if (span.has(i)) put(i - span.first, entry);
    });
    __syncthreads();
  }

  // Whether every entry of the whole list is good, as far as this block answers for it. If so, the
  // pairs that were listed may be copied.
  __device__ bool all_good() {
    const bool bad = hold_against_set();
    return !__syncthreads_or(bad || twins_);
  }

  // Lists anew, with a bad entry somewhere: pairs are now the entries in range, of which the block
  // claims claim_of(how many there are). Records what is refused. Returns that claim.
  template <typename ClaimOf>
  __device__ Claim regroup(bool record_out_of_range, ClaimOf claim_of) {
    if (record_out_of_range) record_faults();
    const Claim claim = list_in_range(claim_of);
    hold_against_set();
    __syncthreads();
    drop_twins(claim);
    return claim;
  }

 private:
  __device__ BlockPair read(uint32_t i) const {
    return {__ldg(ids_.sources + i), __ldg(ids_.destinations + i)};
  }
  __device__ bool in_range(BlockPair pair) const {
    // Unsigned, so that padding is too large as well.
    return static_cast<uint32_t>(pair.source) < static_cast<uint32_t>(ids_.num_sources) &&
           static_cast<uint32_t>(pair.destination) < static_cast<uint32_t>(ids_.num_destinations);
  }
  __device__ void put(uint32_t place, BlockPair pair) {
    const bool good = in_range(pair);
    pairs_[place] = good ? pair : kNoPair;
    if (good) twins_ |= set_.add(pair.destination);
  }

  // Reads the entries of a span, several at a time.
  template <typename Use>
  __device__ void for_entries(Span span, Use use) {
    constexpr int kReadsInFlight = 8;
    for (uint32_t first = span.first + threadIdx.x; first < span.last;
         first += kReadsInFlight * blockDim.x) {
      BlockPair entries[kReadsInFlight];
#pragma unroll
      for (int u = 0; u < kReadsInFlight; ++u) {
        entries[u] = read(min(first + u * blockDim.x, span.last - 1));
      }
#pragma unroll
      for (int u = 0; u < kReadsInFlight; ++u) {
        const uint32_t i = first + u * blockDim.x;
        if (i < span.last) use(i, entries[u]);
      }
    }
  }
  // The destination of an entry, or kNoPair's if the entry is out of range.
  __device__ int32_t destination_of(BlockPair entry) const {
    return in_range(entry) ? entry.destination : kNoPair.destination;
  }
  __device__ int32_t named_by(uint32_t i) const {
    return named_ ? named_[i] : destination_of(read(i));
  }

  // Marks destinations of the share that entries outside of it name. Returns whether this thread
  // saw one, or an entry out of range.
  __device__ bool hold_against_set() {
    bool bad = false;
    auto hold = [&](uint32_t i, int32_t destination) {
      if (destination < 0) {
        bad = true;
      } else if (!entries_.has(i)) {
        bad |= set_.mark(destination);
      }
    };
    if (named_) {
      for (uint32_t i = threadIdx.x; i < ids_.num_ids; i += blockDim.x) hold(i, named_[i]);
    } else {
      for_entries({0, ids_.num_ids},
                  [&](uint32_t i, BlockPair entry) { hold(i, destination_of(entry)); });
    }
    return bad;
  }

  // Each warp counts the entries in range of its part of the list; the sum of the warps before it
  // is the rank of its first.
  template <typename ClaimOf>
  __device__ Claim list_in_range(ClaimOf claim_of) {
    __shared__ uint32_t counts[32];
    __shared__ Span entries;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const uint32_t part = (ids_.num_ids + blockDim.x - 1) / blockDim.x * 32;
    const uint32_t begin = min(warp * part, ids_.num_ids), end = min(begin + part, ids_.num_ids);
    set_.clear();
    if (threadIdx.x == 0) entries = {0, 0};
    uint32_t count = 0;
    for (uint32_t i = begin; i < end; i += 32) count += __popc(in_range_in_warp(i + lane, end));
    if (lane == 0) counts[warp] = count;
    __syncthreads();
    uint32_t rank = 0, total = 0;
    for (uint32_t w = 0; w < warps; ++w) {
      if (w < warp) rank += counts[w];
      total += counts[w];
    }
    const Claim claim = claim_of(total);
    const Span span = claim.pairs;
    for (uint32_t i = begin; i < end; i += 32) {
      const uint32_t good = in_range_in_warp(i + lane, end);
      const uint32_t mine = rank + __popc(good & ((1u << lane) - 1));
      rank += __popc(good);
      if (!(good >> lane & 1) || !span.has(mine)) continue;
      put(mine - span.first, read(i + lane));
      if (mine == span.first) entries.first = i + lane;
      if (mine == span.last - 1) entries.last = i + lane + 1;
    }
    __syncthreads();
    entries_ = entries;
    return claim;
  }
  __device__ uint32_t in_range_in_warp(uint32_t i, uint32_t end) const {
    return __ballot_sync(~0u, i < end && named_by(i) >= 0);
  }

  __device__ void drop_twins(Claim claim) {
    for (uint32_t i = entries_.first + claim.first_is_shared + threadIdx.x; i < entries_.last;
         i += blockDim.x) {
      const BlockPair entry = read(i);
      if (in_range(entry) && set_.is_marked(entry.destination)) {
        record(PageFault::kDuplicate, i, entry.destination, ids_.num_destinations);
      }
    }
    for (uint32_t k = threadIdx.x; k < claim.pairs.size(); k += blockDim.x) {
      if (set_.is_marked(pairs_[k].destination)) pairs_[k] = kNoPair;
    }
    __syncthreads();
  }

  __device__ void record_faults() {
    for (uint32_t i = threadIdx.x; i < ids_.num_ids; i += blockDim.x) {
      const BlockPair entry = read(i);
      if (entry.source < 0 || entry.destination < 0) continue;
      if (entry.source >= ids_.num_sources) {
        record(PageFault::kSourceOutOfRange, i, entry.source, ids_.num_sources);
      } else if (entry.destination >= ids_.num_destinations) {
        record(PageFault::kDestinationOutOfRange, i, entry.destination, ids_.num_destinations);
      }
    }
  }
  __device__ void record(PageFault fault, uint32_t i, int32_t id, int32_t limit) {
    if (ids_.errors) record_fault(ids_.errors, fault, static_cast<int32_t>(i), id, limit);
  }

  const IdParams& ids_;
  BlockPair* pairs_;
  DestinationSet set_;
  int32_t* named_;      // destination of every entry, if they are read once
  Span entries_{0, 0};  // of the list, between which the share's pairs lie
  bool twins_ = false;  // this thread saw a destination of the share named by two of its pairs
};

#endif

}  // namespace jaxkv
