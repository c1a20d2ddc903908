// The check of the ids, which every thread block performs for itself: no extra launch, no scratch
// memory in HBM.
//
// A block is responsible for a stretch of the pairs, its share. It lists the share in shared
// memory, so that the copy can begin. Then it adds the destinations of the share to a hash set, and
// looks up all ids in that set: this finds an entry outside of the share with the same destination,
// and the owner of that entry finds the duplicate likewise. The reads of all ids are issued before
// anything else, those of the share first, because loads from the host would delay the loads behind
// them. While every entry is valid, pair i is entry i. If one is not, blocks do not communicate,
// but all read the same list: pair i is then the i-th entry in range (regroup). A list of at most
// 32 ids is the exception: one warp of each block checks all of it (list_few).
#pragma once

#include <algorithm>
#include <bit>

#include "common/ptx.cuh"
#include "transfer/id_entries.cuh"

namespace jaxkv::transfer {

struct Span {
  uint32_t first, last;

  __host__ __device__ uint32_t size() const { return last - first; }
  __device__ bool has(uint32_t i) const { return first <= i && i < last; }
};

// The pairs that a block is responsible for.
struct Claim {
  Span pairs;
  bool first_is_shared;  // with the preceding block, which records its errors
};

// Shared memory of a share of up to `capacity` pairs, and of a copy of all ids if there is room.
struct ShareSize {
  static constexpr uint32_t kMaxCapacity = 12 * 1024;
  static constexpr uint32_t kMaxSlots = 16 * 1024;
  static constexpr uint32_t kFilterBits = 64 * 1024;

  uint32_t capacity, log2_slots;
  uint32_t copied_ids = 0;  // a multiple of 4

  explicit ShareSize(uint32_t pairs)
      : capacity(pairs),
        log2_slots(std::bit_width(std::clamp(pairs + pairs / 4, 32u, kMaxSlots) - 1)) {}

  // Adds a copy of `ids` entries, if the total is at most `max_bytes` bytes.
  ShareSize with_copy(uint32_t ids, uint32_t max_bytes) const {
    ShareSize size = *this;
    const uint32_t rounded = (ids + 3) / 4 * 4;
    if (bytes() + rounded * sizeof(BlockPair) <= max_bytes) size.copied_ids = rounded;
    return size;
  }
  __host__ __device__ uint32_t slots() const { return 1u << log2_slots; }
  uint32_t bytes() const {
    return kFilterBits / 8 + (capacity + copied_ids) * sizeof(BlockPair) +
           slots() * sizeof(uint32_t);
  }
};

// Destinations, by open addressing. A marked key is a duplicate. Almost all look-ups are misses,
// which a bit filter answers: exactly, as long as the destination has no more blocks than the
// filter has bits.
class DestinationSet {
 public:
  static constexpr uint32_t kFilterWords = ShareSize::kFilterBits / 32;

  __device__ DestinationSet(uint32_t* filter, uint32_t* slots, uint32_t log2_slots)
      : filter_(filter), slots_(slots), log2_slots_(log2_slots) {}

  __device__ void clear() {
    for (uint32_t word = threadIdx.x; word < kFilterWords; word += blockDim.x) filter_[word] = 0;
    for (uint32_t slot = threadIdx.x; slot < 1u << log2_slots_; slot += blockDim.x) {
      slots_[slot] = kEmpty;
    }
  }
  // Whether the set may contain a key; valid after all keys were added.
  __device__ bool may_have(uint32_t key) const {
    return filter_[key / 32 % kFilterWords] >> key % 32 & 1;
  }
  // Adds a key, or marks it if present. Returns whether it was present.
  __device__ bool add(uint32_t key) {
    atomicOr(&filter_[key / 32 % kFilterWords], 1u << key % 32);
    for (uint32_t slot = home(key);; slot = next(slot)) {
      const uint32_t old = atomicCAS(&slots_[slot], kEmpty, key);
      if (old == kEmpty) return false;
      if ((old & ~kMark) != key) continue;
      atomicOr(&slots_[slot], kMark);
      return true;
    }
  }
  // Marks a key if present. Returns whether it was present.
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
  static constexpr uint32_t kEmpty = ~0u;  // not a valid key: a destination is below 2^31 - 1

  __device__ uint32_t home(uint32_t key) const { return key * 0x9e3779b1u >> (32 - log2_slots_); }
  __device__ uint32_t next(uint32_t slot) const { return (slot + 1) & ((1u << log2_slots_) - 1); }
  __device__ uint32_t volatile_slot(uint32_t slot) const {
    return static_cast<volatile uint32_t*>(slots_)[slot];
  }

  uint32_t* filter_;
  uint32_t* slots_;
  uint32_t log2_slots_;
};

// Asynchronous copy of words from global to shared memory, without registers. `to` is 16-byte
// aligned.
inline __device__ void start_copy_to_shared(int32_t* to, const int32_t* from, uint32_t words) {
  const auto start = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  const uint32_t vectors = reinterpret_cast<uintptr_t>(from) % 16 == 0 ? words / 4 : 0;
  for (uint32_t i = threadIdx.x; i < vectors; i += blockDim.x) {
    ptx::cp_async_16(start + i * 16, from + i * 4);
  }
  for (uint32_t i = vectors * 4 + threadIdx.x; i < words; i += blockDim.x) {
    ptx::cp_async_4(start + i * 4, from + i);
  }
}

// A block's share of the pairs. All threads of the block must call all members; each thread reads
// up to kReads entries at a time.
template <int kReads>
class Share {
 public:
  __device__ Share(const IdParams& ids, const ShareSize& size, std::byte* shared)
      : Share(ids, size, reinterpret_cast<int32_t*>(shared),
              reinterpret_cast<uint32_t*>(shared) + 2 * (size.copied_ids + size.capacity)) {}

  // Pairs of the share; kNoPair entries must be skipped.
  __device__ const BlockPair* pairs() const { return pairs_; }

  // Lists the entries [span.first, span.last), assuming that every entry is valid.
  __device__ void list(Span span) {
    start_copying_ids(span);
    set_.clear();
    entries_ = span;
    ptx::cp_async_wait_groups();
    __syncthreads();
    for_entries(span, [&](uint32_t i, BlockPair entry) {
      pairs_[i - span.first] = in_range(entry) ? entry : kNoPair;
    });
    __syncthreads();
  }

  // Whether every entry of the entire list is valid, as far as this block is responsible. If so,
  // the listed pairs may be copied.
  __device__ bool all_valid() {
    duplicates_ = false;
    for (uint32_t k = threadIdx.x; k < entries_.size(); k += blockDim.x) {
      const int32_t destination = pairs_[k].destination;
      if (destination >= 0) duplicates_ |= set_.add(destination);
    }
    ptx::cp_async_wait_all();
    __syncthreads();
    const bool invalid = mark_duplicates_of_share();
    return !__syncthreads_or(invalid || duplicates_);
  }

  // Lists the share again if there is an invalid entry anywhere: pairs are now the entries in
  // range, of which the block claims claim_of(number of entries in range). Records the invalid
  // entries. Returns the claim.
  template <typename ClaimOf>
  __device__ Claim regroup(bool record_out_of_range, ClaimOf claim_of) {
    if (record_out_of_range) record_range_errors();
    const Claim claim = list_in_range(claim_of);
    mark_duplicates_of_share();
    __syncthreads();
    drop_duplicates(claim);
    return claim;
  }

 private:
  __device__ Share(const IdParams& ids, const ShareSize& size, int32_t* copied, uint32_t* behind)
      : ids_(ids),
        copied_ids_(size.copied_ids),
        copied_sources_(copied),
        copied_destinations_(copied + size.copied_ids),
        pairs_(reinterpret_cast<BlockPair*>(copied + 2 * size.copied_ids)),
        set_(behind, behind + DestinationSet::kFilterWords, size.log2_slots) {}

  // The ids of `share` first, as a cp.async group of their own, for which list() waits.
  __device__ void start_copying_ids(Span share) {
    if (copied_ids_ == 0) return;
    const Span first{share.first / 4 * 4, min((share.last + 3) / 4 * 4, ids_.num_ids)};
    start_copying_ids_of(first);
    ptx::cp_async_commit();
    start_copying_ids_of({0, first.first});
    start_copying_ids_of({first.last, ids_.num_ids});
    const uint32_t behind = ids_.num_ids + threadIdx.x;
    if (behind < copied_ids_) copied_sources_[behind] = copied_destinations_[behind] = 0;
  }
  __device__ void start_copying_ids_of(Span span) {
    const uint32_t i = span.first;
    start_copy_to_shared(copied_sources_ + i, ids_.sources + i, span.size());
    start_copy_to_shared(copied_destinations_ + i, ids_.destinations + i, span.size());
  }
  __device__ BlockPair entry(uint32_t i) const {
    if (copied_ids_) return {copied_sources_[i], copied_destinations_[i]};
    return {__ldg(ids_.sources + i), __ldg(ids_.destinations + i)};
  }
  __device__ bool in_range(BlockPair pair) const { return is_in_range(ids_, pair); }
  __device__ void put(uint32_t place, BlockPair pair) {
    const bool valid = in_range(pair);
    pairs_[place] = valid ? pair : kNoPair;
    if (valid) duplicates_ |= set_.add(pair.destination);
  }

  // Reads the entries of a span, kReads at a time.
  template <typename Use>
  __device__ void for_entries(Span span, Use use) {
    for (uint32_t first = span.first + threadIdx.x; first < span.last;
         first += kReads * blockDim.x) {
      BlockPair entries[kReads];
#pragma unroll
      for (int u = 0; u < kReads; ++u) {
        entries[u] = entry(min(first + u * blockDim.x, span.last - 1));
      }
#pragma unroll
      for (int u = 0; u < kReads; ++u) {
        const uint32_t i = first + u * blockDim.x;
        if (i < span.last) use(i, entries[u]);
      }
    }
  }

  // Marks destinations of the share that also occur outside of it. Returns whether this thread
  // found one, or an entry out of range.
  __device__ bool mark_duplicates_of_share() {
    if (copied_ids_) return mark_duplicates_of_copied_ids();
    bool invalid = false;
    for_entries({0, ids_.num_ids}, [&](uint32_t i, BlockPair entry) {
      invalid |= !in_range(entry) || (set_.may_have(entry.destination) && mark_duplicate(i, entry));
    });
    return invalid;
  }
  // The same for ids in shared memory, four entries per iteration.
  __device__ bool mark_duplicates_of_copied_ids() {
    const auto* sources = reinterpret_cast<const uint4*>(copied_sources_);
    const auto* destinations = reinterpret_cast<const uint4*>(copied_destinations_);
    uint32_t max_source = 0, max_destination = 0;
    bool invalid = false;
    for (uint32_t four = threadIdx.x; four < copied_ids_ / 4; four += blockDim.x) {
      const uint4 s = sources[four], d = destinations[four];
      max_source = max(max(max(s.x, s.y), max(s.z, s.w)), max_source);
      max_destination = max(max(max(d.x, d.y), max(d.z, d.w)), max_destination);
      const bool suspect =
          set_.may_have(d.x) | set_.may_have(d.y) | set_.may_have(d.z) | set_.may_have(d.w);
      if (!suspect) continue;
      for (uint32_t i = four * 4; i < min(four * 4 + 4, ids_.num_ids); ++i) {
        invalid |= mark_duplicate(i, entry(i));
      }
    }
    return invalid || max_source >= static_cast<uint32_t>(ids_.num_sources) ||
           max_destination >= static_cast<uint32_t>(ids_.num_destinations);
  }
  // Marks the destination of an entry outside of the share if the share has it too. Returns whether
  // it does.
  __device__ bool mark_duplicate(uint32_t i, BlockPair entry) {
    return !entries_.has(i) && in_range(entry) && set_.mark(entry.destination);
  }

  // Each warp counts the entries in range in its part of the list; the prefix sum over the warps is
  // the index of its first pair.
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
      const uint32_t valid = in_range_in_warp(i + lane, end);
      const uint32_t pair_index = rank + __popc(valid & ((1u << lane) - 1));
      rank += __popc(valid);
      if (!(valid >> lane & 1) || !span.has(pair_index)) continue;
      put(pair_index - span.first, entry(i + lane));
      if (pair_index == span.first) entries.first = i + lane;
      if (pair_index == span.last - 1) entries.last = i + lane + 1;
    }
    __syncthreads();
    entries_ = entries;
    return claim;
  }
  __device__ uint32_t in_range_in_warp(uint32_t i, uint32_t end) const {
    return __ballot_sync(~0u, i < end && in_range(entry(i)));
  }

  __device__ void drop_duplicates(Claim claim) {
    for (uint32_t i = entries_.first + claim.first_is_shared + threadIdx.x; i < entries_.last;
         i += blockDim.x) {
      const BlockPair pair = entry(i);
      if (in_range(pair) && set_.is_marked(pair.destination)) {
        record_duplicate(ids_, i, pair.destination);
      }
    }
    for (uint32_t k = threadIdx.x; k < claim.pairs.size(); k += blockDim.x) {
      if (set_.is_marked(pairs_[k].destination)) pairs_[k] = kNoPair;
    }
    __syncthreads();
  }

  __device__ void record_range_errors() {
    for (uint32_t i = threadIdx.x; i < ids_.num_ids; i += blockDim.x) {
      record_range_error(ids_, i, entry(i));
    }
  }

  const IdParams& ids_;
  uint32_t copied_ids_;  // in shared memory; 0 if there was no room
  int32_t *copied_sources_, *copied_destinations_;
  BlockPair* pairs_;
  DestinationSet set_;
  Span entries_{0, 0};       // range of the list that contains the share's entries
  bool duplicates_ = false;  // this thread found two pairs of the share with the same destination
};

// Stages the pairs of a checked list in shared memory, where reading them does not queue behind
// loads from the host. XLA reuses the memory of the list if the last wait for an asynchronous copy
// times out before the copy begins: what is there then must not become an address outside of the
// arrays.
inline __device__ void stage(const IdParams& limits, const BlockPair* pairs, Span span,
                             BlockPair* staged) {
  for (uint32_t k = threadIdx.x; k < span.size(); k += blockDim.x) {
    const BlockPair pair = pairs[span.first + k];
    staged[k] = is_in_range(limits, pair) ? pair : kNoPair;
  }
  __syncthreads();
}

}  // namespace jaxkv::transfer
