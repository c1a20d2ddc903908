// Rows of KV tokens that a sparse-attention step reads: a hot buffer in device memory in front of a
// host pool. Shared by the CUDA kernels and the CPU implementation.
//
// Each request has `slots` rows of the hot buffer. Position p of a request is resident in slot s if
// slot_of[p] == s and positions[s] == p: entries of slot_of that fail the second test are of rows
// that were replaced or released, so neither has to clear them. used[s] is the request's clock at
// the last use of slot s. Victims are the slots of the longest time since their last use, free ones
// first, at equal times the lower slots; the i-th missing position takes the i-th lowest victim.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/error_ring.h"
#include "common/host_device.h"
#include "xla/ffi/api/ffi.h"

namespace jaxkv::sparse {

namespace ffi = xla::ffi;

inline constexpr int32_t kMaxIds = 4096;  // of a request: a hash table of them is in shared memory
inline constexpr int32_t kMaxSlots = 12288;  // of a request: their positions are in shared memory
inline constexpr int32_t kMaxBatch = 4096;   // a prefix sum over it is in shared memory
inline constexpr int32_t kWordBytes = 16;    // rows consist of whole words
inline constexpr int32_t kPadding = -1;
inline constexpr int32_t kNoRow = -1;
inline constexpr uint32_t kFreeAge = ~0u;  // older than any row

// Division of numbers below 2^31 by a number of at least 1, as a multiplication: the kernels divide
// several times for each row, and instructions dominate their time.
class Divisor {
 public:
  Divisor() = default;
  explicit Divisor(int32_t divisor) : divisor_(divisor) {
    while ((int64_t{1} << (shift_ - 31)) < divisor) ++shift_;
    factor_ = static_cast<uint32_t>(((uint64_t{1} << shift_) + divisor - 1) / divisor);
  }
  JAXKV_HOST_DEVICE uint32_t quotient(uint32_t number) const {
    return static_cast<uint32_t>(uint64_t{number} * factor_ >> shift_);
  }
  JAXKV_HOST_DEVICE uint32_t value() const { return divisor_; }

 private:
  uint32_t divisor_ = 1, factor_ = 1u << 31, shift_ = 31;
};

// A row that is copied between a token of the pool and a slot of its request.
struct RowMove {
  int32_t token, slot;  // slot kNoRow: nothing is copied
};

// One layer of a call. The pointers are to memory of the device that runs it, of layer `layer`
// where an array has a layer axis.
struct RowBatch {
  Operation operation = Operation::kSparseFetch;
  bool append = false;  // rows are written, not fetched
  int32_t num_requests = 0, num_ids = 0, slots = 0, max_length = 0;
  int32_t num_columns = 0, num_pages = 0;
  Divisor page_size;
  int32_t first_row = 0;                 // of the layer in the hot buffer of all layers
  const int32_t* ids = nullptr;          // [num_requests, num_ids]
  const int32_t* lengths = nullptr;      // [num_requests]; null for an append
  const int32_t* block_table = nullptr;  // [num_requests, num_columns]
  int32_t* rows = nullptr;               // [num_requests, num_ids]; null for an append
  RowMove* moves = nullptr;              // fetch: the first counts[b]; append: one for each id
  int32_t* counts = nullptr;             // [num_requests]; null for an append
  int32_t* positions = nullptr;          // [num_requests, slots]
  int32_t* used = nullptr;               // [num_requests, slots]
  int16_t* slot_of = nullptr;            // [num_requests, max_length]
  int32_t* clock = nullptr;              // [num_requests]
};

// Addresses of rows: of a token in the pool, and of a slot in the hot buffer.
struct RowAddresses {
  std::byte* pool = nullptr;
  std::byte* hot = nullptr;
  const std::byte* added = nullptr;  // rows of an append, [num_requests, num_ids]
  int64_t page_stride = 0, token_stride = 0;
  Divisor page_size;
  int32_t row_bytes = 0;

  JAXKV_HOST_DEVICE std::byte* of_token(int32_t token) const {
    const uint32_t page = page_size.quotient(token);
    return pool + page * page_stride + (token - page * page_size.value()) * token_stride;
  }
  JAXKV_HOST_DEVICE std::byte* of_slot(int64_t row) const { return hot + row * row_bytes; }
};

// Whether an id is a position of the request; passes it to `fault` if it is neither that nor
// padding.
template <typename Fault>
JAXKV_HOST_DEVICE bool is_position(const RowBatch& b, int32_t request, int32_t entry, int32_t id,
                                   int32_t limit, Fault&& fault) {
  if (static_cast<uint32_t>(id) < static_cast<uint32_t>(limit)) return true;
  if (id != kPadding) {
    fault(ErrorCode::kSourceOutOfRange, request * b.num_ids + entry, id, limit);
  }
  return false;
}

// Number of positions of a request that may be read or written.
JAXKV_HOST_DEVICE inline int32_t limit_of(const RowBatch& b, int32_t request) {
  if (!b.lengths) return b.max_length;
  const int32_t length = b.lengths[request];
  return length < 0 ? 0 : length < b.max_length ? length : b.max_length;
}

// The token of the pool that stores a position, given the page of that position.
JAXKV_HOST_DEVICE inline int32_t token_of(const RowBatch& b, int32_t page, int32_t position) {
  const auto column = static_cast<int32_t>(b.page_size.quotient(position));
  return position + (page - column) * static_cast<int32_t>(b.page_size.value());
}

// The token of the pool that stores a position, or kNoRow, after passing the error to `fault`.
template <typename Fault>
JAXKV_HOST_DEVICE int32_t find_token(const RowBatch& b, int32_t request, int32_t position,
                                     Fault&& fault) {
  const auto column = static_cast<int32_t>(b.page_size.quotient(position));
  if (column >= b.num_columns) {
    fault(ErrorCode::kColumnOutOfRange, request, column, b.num_columns);
    return kNoRow;
  }
  const int32_t place = request * b.num_columns + column;
  const int32_t page = b.block_table[place];
  if (static_cast<uint32_t>(page) >= static_cast<uint32_t>(b.num_pages)) {
    fault(ErrorCode::kDestinationOutOfRange, place, page, b.num_pages);
    return kNoRow;
  }
  return token_of(b, page, position);
}

struct RowCall {
  RowBatch batch;
  RowAddresses addresses;
  Scope scope;
  int32_t num_sms;
};

// Checks every size, so that no id, slot or page in range addresses memory outside an array.
//   fetch: args ids, lengths, block_table, pool, state; rets rows, moves, counts, state
//   append: args positions, block_table, rows, state; rets moves, state
//   state: hot, positions, used, slot_of, clock
ffi::ErrorOr<RowCall> decode_rows(bool append, ffi::RemainingArgs args, ffi::RemainingRets rets,
                                  ffi::Dictionary attributes);

// Writes the rows of an append to the pool: args moves, rows, pool; rets pool. This is a separate
// call, since XLA places all results of a call in host memory if one of them is there.
ffi::ErrorOr<RowCall> decode_added_rows(ffi::RemainingArgs args, ffi::RemainingRets rets,
                                        ffi::Dictionary attributes);

}  // namespace jaxkv::sparse
