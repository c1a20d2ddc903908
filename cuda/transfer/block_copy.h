// One page copy as decoded by the handlers: checked operands, no CUDA.
//
// A copy has a dense side (every block contiguous: a layer of the device cache, or any array of
// swap_blocks) and a strided side (a host layout, in which a block consists of several contiguous
// runs). Both directions and all layouts have this form. A buffer is one array's blocks of one
// layer; on either side, buffer b belongs to array b modulo the number of arrays, which is one for
// a host pool, and one of all layers for a stacked cache.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/error_ring.h"
#include "xla/ffi/api/ffi.h"

namespace jaxkv::transfer {

namespace ffi = xla::ffi;

// The attribute `copy`, as encoded by block_copy.py. A single attribute for all values, because
// each attribute adds host time to each call.
using CopyAttribute = ffi::Span<const int64_t>;

// The public function of a copy: the first number of the attribute, without the scope.
inline Operation operation_of(CopyAttribute attribute) {
  return attribute.size() ? static_cast<Operation>(attribute[0] & 0xff) : Operation::kUnknown;
}

// In the order of the attribute.
struct CopyGeometry {
  int64_t block_bytes;
  int64_t dense_stride;  // bytes between blocks on the dense side
  int64_t run_bytes;
  int64_t count0, count1;          // runs per block, row-major
  int64_t stride0, stride1;        // bytes between runs on the strided side
  int64_t page_stride;             // bytes between blocks on the strided side
  int64_t num_dense, num_strided;  // blocks on either side

  bool single_run() const { return run_bytes == block_bytes; }
  int64_t run_offset(int64_t i0, int64_t i1) const { return i0 * stride0 + i1 * stride1; }
};

// Ids of an operand. May be device memory: on a GPU, not readable by the host before
// check_host_ids.
struct IdList {
  std::span<const int32_t> words;  // of the operand
  size_t first, count;             // the ids among them

  const int32_t* ids() const { return words.data() + first; }
  size_t size() const { return count; }
  bool is_host_ids() const { return first > 0; }  // they have a header
};

// Source and destination ids as passed by the caller, unchecked.
struct IdLists {
  IdList sources, destinations;
  int32_t num_sources, num_destinations;  // number of blocks on each side
  Operation operation;
  Scope scope;

  bool share_operand() const { return sources.words.data() == destinations.words.data(); }
};

// Maximum number of ids that the copy kernel checks itself; longer lists go through plan_pairs.
inline constexpr size_t kInlineIds = 12 * 1024;

// Limits of an asynchronous copy: segments, and buffers in each.
inline constexpr size_t kMaxSegments = 1023;
inline constexpr size_t kMaxSegmentBuffers = 256;

struct alignas(8) BlockPair {  // one load
  int32_t source, destination;
};

// Checked pairs: the result of plan_pairs and operand of copy_pairs, int32[2 + 2n].
struct PairList {
  int32_t* count;  // valid pairs
  BlockPair* pairs;
  size_t capacity;
};

struct BlockCopy {
  bool to_dense = true;
  int num_sms = 1;
  CopyGeometry geometry{};
  // Address of block 0, per buffer. Valid until this thread decodes another copy.
  std::span<std::byte* const> dense{}, strided{};

  int32_t dense_block(BlockPair pair) const { return to_dense ? pair.destination : pair.source; }
  int32_t strided_block(BlockPair pair) const { return to_dense ? pair.source : pair.destination; }
};

// One of several copies of a call: one for each block size of each group.
struct GroupCopy {
  BlockCopy copy;
  IdLists ids;     // unchecked ids, or ...
  PairList pairs;  // ... checked pairs if `pairs.pairs` is not null
  bool new_ids;    // of the first copy of a group: its ids are not those of the preceding copy
};

// The scope in which a copy was traced, or the copies of a call.
Scope scope_of_copy(CopyAttribute attribute);
Scope scope_of_copies(CopyAttribute attribute);

ffi::ErrorOr<IdLists> decode_ids(ffi::Buffer<ffi::S32> sources, ffi::Buffer<ffi::S32> destinations,
                                 CopyAttribute attribute);

ffi::ErrorOr<PairList> decode_pairs(ffi::Buffer<ffi::S32> operand);

// Decodes the arrays and checks every size, so that no id in range addresses memory outside a
// buffer.
//   args: strided arrays, then dense arrays; rets: the written side.
ffi::ErrorOr<BlockCopy> decode_copy(ffi::RemainingArgs args, ffi::RemainingRets rets,
                                    CopyAttribute attribute);

// Decodes the copies of a call of several. Valid until this thread decodes another copy.
//   args: id lists, then the arrays that the copies read, then those that they write; rets: the
//   written arrays. Each copy has the positions of its operands. Copies may write the same array.
ffi::ErrorOr<std::span<const GroupCopy>> decode_copies(ffi::RemainingArgs args,
                                                       ffi::RemainingRets rets,
                                                       CopyAttribute attribute);

// Checks that the list is HostIds and readable by the host now.
ffi::Error check_host_ids(const IdList& list, const char* name);

// Entries of id lists that are not padding and can't be copied.
struct RejectedIds {
  uint64_t count = 0;
  std::vector<ErrorEntry> first;  // as many as an error ring keeps
};

// Checked pairs, in memory of this thread until its next call, or in `large`.
struct SelectedPairs {
  SelectedPairs() = default;
  SelectedPairs(SelectedPairs&&) = default;  // not copied: `pairs` may refer to `large`

  std::vector<BlockPair> large;
  std::span<const BlockPair> pairs;
};

// Valid pairs of ids that the host may read; the others, except padding, are rejected.
SelectedPairs select_pairs(const IdLists& ids, RejectedIds* rejected);

// The CPU backend's copy of planned pairs.
ffi::Error copy_pairs_cpu(ffi::Buffer<ffi::S32> planned, ffi::RemainingArgs args,
                          ffi::RemainingRets rets, CopyAttribute attribute);

}  // namespace jaxkv::transfer
