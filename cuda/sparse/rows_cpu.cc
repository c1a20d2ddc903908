// The CPU backend of sparse rows.
#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "sparse/rows.h"

namespace jaxkv::sparse {

namespace {

// The state of one request, and the faults of its entries.
class Request {
 public:
  Request(const RowCall& call, int32_t request)
      : b_(call.batch),
        request_(request),
        limit_(limit_of(call.batch, request)),
        scope_(call.scope),
        ids_(b_.ids + int64_t{request} * b_.num_ids),
        positions_(b_.positions + int64_t{request} * b_.slots),
        used_(b_.used + int64_t{request} * b_.slots),
        slot_of_(b_.slot_of + int64_t{request} * b_.max_length),
        moves_(b_.moves + int64_t{request} * b_.num_ids),
        now_(static_cast<int32_t>(static_cast<uint32_t>(b_.clock[request]) + 1)) {
    b_.clock[request] = now_;
  }

 private:
  auto fault() const {
    return [this](ErrorCode code, int32_t position, int32_t id, int32_t limit) {
      record_host_error(scope_, {code, b_.operation}, position, id, limit);
    };
  }

 public:
  // The slot of each id, kNoRow for padding and errors; writes the moves. Returns their number.
  int32_t look_up(std::vector<int32_t>& slots) {
    std::vector<int32_t> missing, tokens;
    std::unordered_map<int32_t, int32_t> first;  // entry of an id
    std::vector<int32_t> same_as(b_.num_ids, kNoRow);
    slots.assign(b_.num_ids, kNoRow);
    for (int32_t i = 0; i < b_.num_ids; ++i) {
      if (b_.append) moves_[i] = {kNoRow, kNoRow};
      if (!is_position(b_, request_, i, ids_[i], limit_, fault())) continue;
      const int32_t resident = slot_if_resident(ids_[i]);
      if (!b_.append && resident != kNoRow) {
        use(resident);
        slots[i] = resident;
        continue;
      }
      const auto [entry, is_new] = first.emplace(ids_[i], i);
      if (!is_new) {
        same_as[i] = entry->second;
        if (b_.append) fault()(ErrorCode::kDuplicate, request_ * b_.num_ids + i, ids_[i], 0);
        continue;
      }
      const int32_t token = find_token(b_, request_, ids_[i], fault());
      if (token == kNoRow) continue;
      if (resident != kNoRow) {
        use(resident);
        moves_[i] = {token, resident};
        continue;
      }
      missing.push_back(i);
      tokens.push_back(token);
    }
    place(missing, tokens, slots);
    for (int32_t i = 0; i < b_.num_ids; ++i) {
      if (same_as[i] != kNoRow) slots[i] = slots[same_as[i]];
    }
    return static_cast<int32_t>(missing.size());
  }

 private:
  int32_t slot_if_resident(int32_t position) const {
    const int32_t slot = slot_of_[position];
    return slot >= 0 && slot < b_.slots && positions_[slot] == position ? slot : kNoRow;
  }
  void use(int32_t slot) { used_[slot] = now_; }

  uint32_t age(int32_t slot) const {
    if (positions_[slot] < 0) return kFreeAge;
    return static_cast<uint32_t>(now_) - static_cast<uint32_t>(used_[slot]);
  }

  // Gives the missing entries the slots of the least recently used rows.
  void place(const std::vector<int32_t>& missing, const std::vector<int32_t>& tokens,
             std::vector<int32_t>& slots) {
    if (missing.empty()) return;
    std::vector<int32_t> order(b_.slots);
    for (int32_t s = 0; s < b_.slots; ++s) order[s] = s;
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t left, int32_t right) { return age(left) > age(right); });
    std::vector<int32_t> victims(order.begin(), order.begin() + missing.size());
    std::sort(victims.begin(), victims.end());
    for (size_t rank = 0; rank < missing.size(); ++rank) {
      const int32_t entry = missing[rank], slot = victims[rank];
      positions_[slot] = ids_[entry];
      slot_of_[ids_[entry]] = static_cast<int16_t>(slot);
      use(slot);
      slots[entry] = slot;
      moves_[b_.append ? entry : rank] = {tokens[rank], slot};
    }
  }

  const RowBatch& b_;
  const int32_t request_, limit_;
  const Scope scope_;
  const int32_t* ids_;
  int32_t *positions_, *used_;
  int16_t* slot_of_;
  RowMove* moves_;
  const int32_t now_;
};

ffi::Error fetch_cpu(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes) {
  const auto call = decode_rows(/*append=*/false, args, rets, attributes);
  if (!call.has_value()) return call.error();
  const RowBatch& b = call->batch;
  const RowAddresses& addresses = call->addresses;
  std::vector<int32_t> slots;
  for (int32_t r = 0; r < b.num_requests; ++r) {
    b.counts[r] = Request(*call, r).look_up(slots);
    for (int32_t i = 0; i < b.num_ids; ++i) {
      b.rows[int64_t{r} * b.num_ids + i] =
          slots[i] == kNoRow ? kNoRow : b.first_row + r * b.slots + slots[i];
    }
    const RowMove* moves = b.moves + int64_t{r} * b.num_ids;
    for (int32_t m = 0; m < b.counts[r]; ++m) {
      std::memcpy(addresses.of_slot(int64_t{r} * b.slots + moves[m].slot),
                  addresses.of_token(moves[m].token), addresses.row_bytes);
    }
  }
  return ffi::Error::Success();
}

// Copies the rows of an append to `address(move, first row of the request)`.
template <typename Address>
void copy_added(const RowCall& call, Address&& address) {
  const RowBatch& b = call.batch;
  for (int64_t entry = 0; entry < int64_t{b.num_requests} * b.num_ids; ++entry) {
    const RowMove move = b.moves[entry];
    if (move.slot == kNoRow) continue;
    std::memcpy(address(move, entry / b.num_ids * b.slots),
                call.addresses.added + entry * call.addresses.row_bytes, call.addresses.row_bytes);
  }
}

ffi::Error append_cpu(ffi::RemainingArgs args, ffi::RemainingRets rets,
                      ffi::Dictionary attributes) {
  const auto call = decode_rows(/*append=*/true, args, rets, attributes);
  if (!call.has_value()) return call.error();
  std::vector<int32_t> slots;
  for (int32_t r = 0; r < call->batch.num_requests; ++r) Request(*call, r).look_up(slots);
  copy_added(*call, [&](RowMove move, int64_t first_row) {
    return call->addresses.of_slot(first_row + move.slot);
  });
  return ffi::Error::Success();
}

ffi::Error write_added_cpu(ffi::RemainingArgs args, ffi::RemainingRets rets,
                           ffi::Dictionary attributes) {
  const auto call = decode_added_rows(args, rets, attributes);
  if (!call.has_value()) return call.error();
  copy_added(*call, [&](RowMove move, int64_t) { return call->addresses.of_token(move.token); });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SparseFetchCpu, fetch_cpu,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SparseAppendCpu, append_cpu,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SparseWriteAddedCpu, write_added_cpu,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());

}  // namespace jaxkv::sparse
