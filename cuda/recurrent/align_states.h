// Copies of recurrent states at block boundaries: which rows copy what, and the layout of a state
// in its block. Shared by the CUDA kernel and the CPU implementation.
//
// Semantics are those of vLLM's mamba cache mode "align". A block stores one state. The running
// state of a request is in the block of its last token. The state after k accepted draft tokens is
// found k rows further within a convolution state (a window that slides over the tokens), and k
// columns further along the block table for a temporal state, which has no such rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/error_ring.h"
#include "common/host_device.h"
#include "xla/ffi/api/ffi.h"

namespace jaxkv::recurrent {

namespace ffi = xla::ffi;

inline constexpr int32_t kNullBlock = 0;
// Limits of a call, on every platform: the arrays' addresses and geometries are kernel parameters.
inline constexpr size_t kMaxStates = 256;
inline constexpr size_t kMaxGeometries = 16;  // different ones

// One block of a state array, row-major [outer, width, inner], as encoded by align.py.
struct StateGeometry {
  int64_t temporal;  // 1: always copied completely; 0: slides along `width`
  int64_t outer, width, inner_bytes;

  int64_t block_bytes() const { return outer * width * inner_bytes; }
  bool operator==(const StateGeometry&) const = default;
};

// The batch of a step; all pointers are to memory of the device that runs the call.
struct AlignBatch {
  bool before = false;  // the call precedes the step, moving the state to where the step writes
  bool has_temporal = false;
  int32_t block_size = 0, num_blocks = 0;
  int32_t num_rows = 0, num_columns = 0;  // B and W
  const int32_t* query_start_loc = nullptr;
  const int32_t* seq_lens = nullptr;
  const int32_t* num_reqs = nullptr;
  const int32_t* block_table = nullptr;
  const int32_t* known = nullptr;  // before: column of the running state or -1; after: draft count
  const int32_t* num_accepted = nullptr;
  int32_t* accepted_out = nullptr;
};

// The copy of a row, in columns of the block table.
struct AlignPlan {
  bool valid = false;  // the other fields are set
  bool reset = false;  // the state is then in place for an accepted count of 1
  bool copies = false;
  int64_t source = 0, destination = 0, bias = 0;
};

// The copy of all states of a row, in block ids.
struct StateCopy {
  int32_t source, temporal_source, destination, bias;
};

// After a step that ended at `seq_len` tokens, `drafts` of them speculative: saves the state at the
// last block boundary that the accepted tokens reached. The host need not know the accepted count.
// Mirrored by can_skip_align_postprocess (align.py).
JAXKV_HOST_DEVICE inline AlignPlan plan_postprocess(int32_t seq_len, int32_t drafts,
                                                    int32_t accepted, int32_t block_size) {
  const int64_t certain = int64_t{seq_len} - drafts;  // valid regardless of acceptance
  const int64_t valid = certain + accepted - 1;
  if (certain < 1 || valid < certain || valid > INT32_MAX) return {};
  const int32_t blocks = static_cast<int32_t>(valid) / block_size;
  const int64_t bias = int64_t{blocks} * block_size - certain;
  if (bias < 0) return {};
  const int32_t source = (seq_len - 1) / block_size, destination = blocks - 1;
  const bool same = source == destination;
  return {true, same, !same || bias > 0, source, destination, bias};
}

// Before a step that ends at `seq_len` tokens, of which `query_len` are new.
JAXKV_HOST_DEVICE inline AlignPlan plan_preprocess(int32_t seq_len, int32_t query_len,
                                                   int32_t running, int32_t accepted,
                                                   int32_t block_size) {
  const int32_t computed = seq_len - query_len;
  if (computed < 0) return {};
  if (running < 0) running = computed > 0 ? (computed - 1) / block_size : -1;
  const int32_t current = (seq_len - 1) / block_size;
  if (running < 0 || running == current) return {};
  return {true, true, true, running, current, accepted > 1 ? int64_t{accepted} - 1 : 0};
}

JAXKV_HOST_DEVICE inline AlignPlan plan_row(const AlignBatch& b, int32_t row, int32_t num_reqs,
                                            int32_t accepted) {
  const int32_t seq_len = b.seq_lens[row], known = b.known[row];
  const int32_t query_len = b.query_start_loc[row + 1] - b.query_start_loc[row];
  if (row >= num_reqs || query_len < 1 || seq_len < 1) return {};
  return b.before ? plan_preprocess(seq_len, query_len, known, accepted, b.block_size)
                  : plan_postprocess(seq_len, known, accepted, b.block_size);
}

// Looks up the block ids of a plan. Returns false if the row must not change: it refers to
// kNullBlock, or a column or id is out of range, which is passed to `record`.
template <typename Record>
JAXKV_HOST_DEVICE bool find_blocks(const AlignBatch& b, int32_t row, const AlignPlan& plan,
                                   StateCopy* move, Record&& record) {
  const auto operation = b.before ? Operation::kAlignPreprocess : Operation::kAlignPostprocess;
  const int64_t columns[] = {plan.source, plan.source + (b.has_temporal ? plan.bias : 0),
                             plan.destination};
  int32_t ids[3];
  for (int i = 0; i < 3; ++i) {
    if (columns[i] < 0 || columns[i] >= b.num_columns) {
      const int64_t column = columns[i] > INT32_MAX ? INT32_MAX : columns[i];
      record(Fault(ErrorCode::kColumnOutOfRange, operation), row, static_cast<int32_t>(column),
             b.num_columns);
      return false;
    }
    const int64_t position = int64_t{row} * b.num_columns + columns[i];
    ids[i] = b.block_table[position];
    if (ids[i] == kNullBlock) return false;
    if (ids[i] < 0 || ids[i] >= b.num_blocks) {
      const auto code = i < 2 ? ErrorCode::kSourceOutOfRange : ErrorCode::kDestinationOutOfRange;
      record(Fault(code, operation), static_cast<int32_t>(position), ids[i], b.num_blocks);
      return false;
    }
  }
  *move = {ids[0], ids[1], ids[2], static_cast<int32_t>(plan.bias)};
  return true;
}

struct AlignCall {
  AlignBatch batch;
  Scope scope;
  std::vector<StateGeometry> geometry;
  std::vector<std::byte*> states;  // base address (block 0) of each
};

// Without repetitions.
std::vector<StateGeometry> different_geometries(const std::vector<StateGeometry>& all);

// Checks every size, so that no block id in range addresses memory outside an array.
//   args: int32 operands in the order of AlignBatch, then the states; rets: the counts, the states.
ffi::ErrorOr<AlignCall> decode_align(ffi::RemainingArgs args, ffi::RemainingRets rets,
                                     ffi::Dictionary attributes);

}  // namespace jaxkv::recurrent
