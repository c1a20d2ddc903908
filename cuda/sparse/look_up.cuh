// Which slot holds each id of a request, and which rows must move: one thread block per request.
//
// The slots' positions and last uses are loaded while the ids are: they wait for nothing, and a
// request without missing ids then ends after two dependent loads. Otherwise a hash table in shared
// memory collapses equal ids to the first of them, and a histogram of the ages gives the age of the
// youngest victim, which is exact and needs no sorted list between calls.
//
// Every order that decides a slot is by index (of an entry or slot), never by arrival, so that the
// result equals the CPU implementation's.
#pragma once

#include "common/ptx.cuh"
#include "sparse/look_up_params.cuh"
#include "sparse/warp_sums.cuh"

namespace jaxkv::sparse {

inline constexpr uint16_t kNoRank = 0xffff;
inline constexpr uint32_t kUsedNow = 1u << 31;  // flag of a position whose row this call uses

template <bool kAppend, class Size>
class LookUp {
 public:
  __device__ LookUp(const LookUpParams& p, uint32_t* shared, uint32_t (*sums)[kLanes])
      : p_(p),
        b_(p.batch),
        request_(blockIdx.x),
        ages_(shared),
        held_(ages_ + kBuckets),
        table_(held_ + p.size.slots),
        victims_(reinterpret_cast<uint16_t*>(table_ + p.size.table)),
        ranks_(victims_ + p.size.ids),
        sums_(sums),
        ids_(b_.ids + int64_t{request_} * b_.num_ids),
        positions_(b_.positions + int64_t{request_} * b_.slots),
        used_(b_.used + int64_t{request_} * b_.slots),
        slot_of_(b_.slot_of + int64_t{request_} * b_.max_length) {}

  __device__ void run() {
    ptx::launch_dependents();  // the copy, which then waits for the end of all thread blocks
    now_ = b_.clock[request_] + 1u;
    load_ids();
    load_slots();
    clear_tables();
    check_ids();
    find_resident();
    collapse_equal_ids();
    const bool pending = __syncthreads_or(has_pending());
    if (threadIdx.x == 0) b_.clock[request_] = static_cast<int32_t>(now_);
    uint32_t missing = 0;
    if (pending) {
      if (!kAppend) compute_ages();
      missing = rank_missing();
      if (missing) {
        if (kAppend) {  // which resident rows this call writes is known only now
          compute_ages();
          __syncthreads();
        }
        find_victims(missing);
        place_missing();
      }
    }
    write_results(missing);
  }

 private:
  enum class Kind : uint8_t { kNone, kResident, kPending, kMissing };

  __device__ int32_t entry_of(int u) const { return threadIdx.x * p_.size.ids_of_thread + u; }
  __device__ bool owns(int u) const {
    return u < p_.size.ids_of_thread && entry_of(u) < b_.num_ids;
  }

  // Each warp has a contiguous part of the slots, so that ranks follow the slots.
  __device__ uint32_t slot_of_round(int round) const {
    const uint32_t warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    return (warp * p_.size.slots_of_thread + round) * kLanes + lane;
  }
  // `body(round, slot)` for the slots of this thread; warps take part in all rounds as a whole.
  template <typename Body>
  __device__ void for_slots(Body&& body) const {
#pragma unroll
    for (int round = 0; round < Size::kSlots; ++round) {
      if (round < p_.size.slots_of_thread) body(round, slot_of_round(round));
    }
  }

  __device__ auto fault() const {
    return [this](ErrorCode code, int32_t position, int32_t id, int32_t limit) {
      record_fault(p_.errors, {code, b_.operation}, position, id, limit);
    };
  }

  __device__ void load_ids() {
#pragma unroll
    for (int u = 0; u < Size::kIds; ++u) id_[u] = owns(u) ? __ldg(ids_ + entry_of(u)) : kPadding;
  }
  __device__ void load_slots() {
    for_slots([&](int round, uint32_t slot) {
      position_[round] = slot < p_.size.slots ? positions_[slot] : kNoRow;
      last_use_[round] = slot < p_.size.slots ? used_[slot] : 0;
    });
  }
  __device__ void clear_tables() {
    for (uint32_t i = threadIdx.x; i < p_.size.table; i += blockDim.x) table_[i] = kEmpty;
    for (uint32_t i = threadIdx.x; i < kBuckets; i += blockDim.x) ages_[i] = 0;
  }
  __device__ void check_ids() {
    const int32_t limit = limit_of(b_, request_);
#pragma unroll
    for (int u = 0; u < Size::kIds; ++u) {
      const bool valid = is_position(b_, request_, entry_of(u), id_[u], limit, fault());
      kind_[u] = valid ? Kind::kPending : Kind::kNone;
    }
  }

  // All loads of a kind are issued before the first is used.
  __device__ void find_resident() {
#pragma unroll
    for (int u = 0; u < Size::kIds; ++u) {
      slot_[u] = kind_[u] == Kind::kPending ? slot_of_[id_[u]] : kNoRow;
    }
    for_slots([&](int round, uint32_t slot) {
      if (slot < p_.size.slots) held_[slot] = max(position_[round], kNoRow);
    });
    __syncthreads();  // held_ and the cleared tables
#pragma unroll
    for (int u = 0; u < Size::kIds; ++u) {
      const uint32_t slot = static_cast<uint32_t>(slot_[u]), id = static_cast<uint32_t>(id_[u]);
      const bool resident = slot < p_.size.slots && (held_[slot] & ~kUsedNow) == id;
      if (!resident) slot_[u] = kNoRow;
      if (!resident || kAppend) continue;  // a resident row is to be written by its first entry
      kind_[u] = Kind::kResident;
      use(slot_[u], id_[u]);
    }
    load_pages();
  }
  // Threads with equal ids do so at the same time, with the same values.
  __device__ void use(int32_t slot, int32_t id) {
    held_[slot] = static_cast<uint32_t>(id) | kUsedNow;
    used_[slot] = static_cast<int32_t>(now_);
  }
  // Before the first entry of each id is known, to hide the latency of the loads.
  __device__ void load_pages() {
#pragma unroll
    for (int u = 0; u < Size::kIds; ++u) {
      token_[u] = kNoRow;
      if (kind_[u] != Kind::kPending) continue;
      const auto column = static_cast<int32_t>(b_.page_size.quotient(id_[u]));
      if (column < b_.num_columns) {
        token_[u] = __ldg(b_.block_table + int64_t{request_} * b_.num_columns + column);
      }
    }
  }

  __device__ bool has_pending() const {
    bool pending = false;
#pragma unroll
    for (int u = 0; u < Size::kIds; ++u) pending |= kind_[u] == Kind::kPending;
    return pending;
  }

  // Leaves in each place of the table the lowest entry with its id.
  __device__ void collapse_equal_ids() {
#pragma unroll
    for (int u = 0; u < Size::kIds; ++u) {
      if (kind_[u] == Kind::kPending) place_[u] = insert(entry_of(u), id_[u]);
    }
  }
  __device__ uint32_t insert(uint32_t entry, int32_t id) {
    const uint32_t mask = p_.size.table - 1;
    uint32_t place = (static_cast<uint32_t>(id) * 0x9e3779b1u >> 16) & mask;
    for (;; place = (place + 1) & mask) {
      const uint32_t old = atomicCAS(&table_[place], kEmpty, entry);
      if (old == kEmpty) return place;
      if (__ldg(ids_ + old) != id) continue;
      atomicMin(&table_[place], entry);
      return place;
    }
  }

  // Numbers the missing ids by their first entries. Returns how many there are.
  __device__ uint32_t rank_missing() {
    uint32_t missing = 0;
#pragma unroll
    for (int u = 0; u < Size::kIds; ++u) {
      if (kind_[u] != Kind::kPending) continue;
      if (table_[place_[u]] != static_cast<uint32_t>(entry_of(u))) {
        if (kAppend) {
          fault()(ErrorCode::kDuplicate, request_ * b_.num_ids + entry_of(u), id_[u], 0);
        }
        continue;
      }
      if (static_cast<uint32_t>(token_[u]) >= static_cast<uint32_t>(b_.num_pages)) {
        record_token_fault(p_, request_, id_[u]);
        continue;
      }
      token_[u] = token_of(b_, token_[u], id_[u]);
      kind_[u] = slot_[u] == kNoRow ? Kind::kMissing : Kind::kResident;
      if (kind_[u] == Kind::kMissing) ++missing;
      if (kAppend && kind_[u] == Kind::kResident) use(slot_[u], id_[u]);
    }
    uint32_t total;
    uint32_t rank = exclusive_of_thread(missing, &total);
#pragma unroll
    for (int u = 0; u < Size::kIds; ++u) {
      const bool is_missing = kind_[u] == Kind::kMissing;
      if (owns(u)) ranks_[entry_of(u)] = is_missing ? rank : kNoRank;
      rank += is_missing;
    }
    return total;
  }
  __device__ uint32_t exclusive_of_thread(uint32_t value, uint32_t* total) {
    const uint32_t lane = threadIdx.x % kLanes;
    uint32_t inclusive = value;
    for (uint32_t step = 1; step < kLanes; step *= 2) {
      const uint32_t below = __shfl_up_sync(kAllLanes, inclusive, step);
      if (lane >= step) inclusive += below;
    }
    const uint32_t of_warp = __shfl_sync(kAllLanes, inclusive, kLanes - 1);
    return sums_.exclusive(of_warp, total) + inclusive - value;
  }

  // Replaces the last uses of this thread's slots by their ages, and adds these to the histogram.
  __device__ void compute_ages() {
    for_slots([&](int round, uint32_t slot) {
      const uint32_t held = slot < p_.size.slots ? held_[slot] : kUsedNow;
      const bool is_free = held == static_cast<uint32_t>(kNoRow);
      const uint32_t since = now_ - static_cast<uint32_t>(last_use_[round]);
      const uint32_t age = is_free ? kFreeAge : held & kUsedNow ? 0 : since;
      last_use_[round] = static_cast<int32_t>(age);
      if (age) atomicAdd(&ages_[is_free ? kFreeBucket : min(age, kOldBucket)], 1);
    });
  }
  __device__ uint32_t age(int round) const { return static_cast<uint32_t>(last_use_[round]); }

  // Lists the slots of the `missing` oldest rows, in ascending order.
  __device__ void find_victims(uint32_t missing) {
    const uint32_t smallest = smallest_age(missing);
    uint32_t older = 0, equal = 0;
    for_slots([&](int round, uint32_t) {
      older += __popc(__ballot_sync(kAllLanes, age(round) > smallest));
      equal += __popc(__ballot_sync(kAllLanes, age(round) == smallest));
    });
    uint32_t totals;  // both counts are at most kMaxSlots
    const uint32_t before = sums_.exclusive(older | equal << 16, &totals);
    const uint32_t equal_victims = missing - (totals & 0xffff);
    older = before & 0xffff;
    equal = before >> 16;
    for_slots([&](int round, uint32_t slot) {
      const uint32_t olders = __ballot_sync(kAllLanes, age(round) > smallest);
      const uint32_t equals = __ballot_sync(kAllLanes, age(round) == smallest);
      const uint32_t lower = (1u << threadIdx.x % kLanes) - 1;
      const uint32_t older_rank = older + __popc(olders & lower);
      const uint32_t equal_rank = equal + __popc(equals & lower);
      if (age(round) > smallest || (age(round) == smallest && equal_rank < equal_victims)) {
        victims_[older_rank + min(equal_rank, equal_victims)] = static_cast<uint16_t>(slot);
      }
      older += __popc(olders);
      equal += __popc(equals);
    });
    __syncthreads();
  }

  // The largest age that at least `missing` rows have or exceed: the age of the youngest victim.
  __device__ uint32_t smallest_age(uint32_t missing) {
    if (threadIdx.x < kLanes) find_bucket(missing);
    __syncthreads();
    const uint32_t bucket = ages_[0];
    if (bucket == kFreeBucket) return kFreeAge;
    return bucket == kOldBucket ? search_old_age(missing) : bucket;
  }
  // From the histogram, by one warp. The result takes the place of the bucket of age 0.
  __device__ void find_bucket(uint32_t missing) {
    constexpr int kRows = kBuckets / kLanes;
    const uint32_t lane = threadIdx.x;
    uint32_t counts[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) counts[i] = ages_[i * kLanes + lane];
    // The row of buckets, and how many slots are in those above.
    uint32_t row = kRows - 1, above = 0, from = counts[kRows - 1];
#pragma unroll
    for (int i = kRows - 1; i > 0; --i) {
      const uint32_t with_row = above + __reduce_add_sync(kAllLanes, counts[i]);
      if (row != static_cast<uint32_t>(i) || with_row >= missing) continue;
      above = with_row;
      row = i - 1;
      from = counts[i - 1];
    }
    for (uint32_t step = 1; step < kLanes; step *= 2) {
      const uint32_t higher = __shfl_down_sync(kAllLanes, from, step);
      if (lane + step < kLanes) from += higher;
    }
    const uint32_t lanes = __popc(__ballot_sync(kAllLanes, above + from >= missing));
    if (lane == 0) ages_[0] = row * kLanes + lanes - 1;
  }
  // By a binary search over the ages that share the bucket kOldBucket.
  __device__ uint32_t search_old_age(uint32_t missing) {
    uint32_t oldest = 0;
    for_slots([&](int round, uint32_t) {
      if (age(round) != kFreeAge) oldest = max(oldest, age(round));
    });
    uint32_t low = kOldBucket, high = sums_.maximum(__reduce_max_sync(kAllLanes, oldest));
    while (low < high) {
      const uint32_t middle = low + (high - low + 1) / 2;
      uint32_t count = 0;
      for_slots([&](int round, uint32_t) { count += age(round) >= middle; });
      if (sums_.total(__reduce_add_sync(kAllLanes, count)) >= missing) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }

  // The first entry of each missing id takes its victim.
  __device__ void place_missing() {
#pragma unroll
    for (int u = 0; u < Size::kIds; ++u) {
      if (kind_[u] == Kind::kPending) {  // equal to an earlier entry
        const uint16_t rank = ranks_[table_[place_[u]]];
        if (!kAppend && rank != kNoRank) slot_[u] = victims_[rank];
      }
      if (kind_[u] != Kind::kMissing) continue;
      const int32_t slot = victims_[ranks_[entry_of(u)]];
      slot_[u] = slot;
      positions_[slot] = id_[u];
      used_[slot] = static_cast<int32_t>(now_);
      slot_of_[id_[u]] = static_cast<int16_t>(slot);
    }
  }

  __device__ void write_results(uint32_t missing) {
    const int64_t first = int64_t{request_} * b_.num_ids;
    const int32_t first_row = b_.first_row + request_ * b_.slots;
#pragma unroll
    for (int u = 0; u < Size::kIds; ++u) {
      if (!owns(u)) continue;
      const int64_t entry = first + entry_of(u);
      const bool moves = kind_[u] == Kind::kMissing || (kAppend && kind_[u] == Kind::kResident);
      if (kAppend) {
        b_.moves[entry] = moves ? RowMove{token_[u], slot_[u]} : RowMove{kNoRow, kNoRow};
        continue;
      }
      if (moves) b_.moves[first + ranks_[entry_of(u)]] = {token_[u], slot_[u]};
      b_.rows[entry] = slot_[u] == kNoRow ? kNoRow : first_row + slot_[u];
    }
    if (!kAppend && threadIdx.x == 0) b_.counts[request_] = static_cast<int32_t>(missing);
  }

  static constexpr uint32_t kEmpty = ~0u;

  const LookUpParams& p_;
  const RowBatch& b_;
  const int32_t request_;
  uint32_t *ages_, *held_, *table_;  // histogram; positions of the slots; entries by hash of id
  uint16_t *victims_, *ranks_;       // of the missing ids by rank; rank of an entry
  WarpSums sums_;
  const int32_t* ids_;
  int32_t *positions_, *used_;
  int16_t* slot_of_;
  uint32_t now_ = 0;
  // Of this thread's entries.
  int32_t id_[Size::kIds], slot_[Size::kIds], token_[Size::kIds];
  uint32_t place_[Size::kIds];
  Kind kind_[Size::kIds];
  // Of this thread's slots.
  int32_t position_[Size::kSlots], last_use_[Size::kSlots];
};

template <bool kAppend, class Size>
__global__ void __launch_bounds__(kLookUpThreads)
    look_up(const __grid_constant__ LookUpParams params) {
  extern __shared__ uint32_t look_up_memory[];
  __shared__ uint32_t sums[2][kLanes];
  LookUp<kAppend, Size>(params, look_up_memory, sums).run();
}

}  // namespace jaxkv::sparse
