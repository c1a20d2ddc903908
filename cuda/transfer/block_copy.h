// One page copy as the handlers see it: operands decoded and checked, no CUDA.
//
// A copy has a dense side (each block contiguous: a layer of the device cache, or any array of
// swap_blocks) and a strided side (a host layout, which strews a block over runs). Both directions
// and all layouts are this one shape.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/error_ring.h"
#include "xla/ffi/api/ffi.h"

namespace jaxkv::transfer {

namespace ffi = xla::ffi;

// The attribute `copy`, as block_copy.py writes it: one for all numbers, because each attribute
// takes its time in each call.
using CopyAttribute = ffi::Span<const int64_t>;

// In the order in which the attribute has it.
struct CopyGeometry {
  int64_t block_bytes;
  int64_t run_bytes;
  int64_t count0, count1;          // runs of a block, row-major
  int64_t stride0, stride1;        // bytes between them on the strided side
  int64_t page_stride;             // bytes between blocks on the strided side
  int64_t num_dense, num_strided;  // blocks on either side

  bool single_run() const { return run_bytes == block_bytes; }
  int64_t run_offset(int64_t i0, int64_t i1) const { return i0 * stride0 + i1 * stride1; }
};

// Ids as an operand holds them; maybe device memory, so on a GPU not to be read before
// check_host_ids.
struct IdList {
  std::span<const int32_t> words;
  size_t header;  // words before the ids: kHostIdsHeader for HostIds, else 0

  const int32_t* ids() const { return words.data() + header; }
  size_t size() const { return words.size() - header; }
};

// Which block goes where, as the caller says it.
struct IdLists {
  IdList sources, destinations;
  int32_t num_sources, num_destinations;  // blocks that an id may name
};

// So many ids at most the copy kernel checks itself; more go through plan_pairs.
inline constexpr size_t kInlineIds = 12 * 1024;

struct alignas(8) BlockPair {  // one load
  int32_t source, destination;
};

// Which block goes where, checked: what plan_pairs leaves for copy_pairs, int32[2 + 2n].
struct PairList {
  int32_t* count;  // valid pairs
  BlockPair* pairs;
  size_t capacity;
};

struct BlockCopy {
  bool to_dense = true;
  int num_sms = 1;
  CopyGeometry geometry{};
  // First byte of block 0, per buffer. They last until this thread decodes another copy.
  std::span<std::byte* const> dense{}, strided{};

  int32_t dense_block(BlockPair pair) const { return to_dense ? pair.destination : pair.source; }
  int32_t strided_block(BlockPair pair) const { return to_dense ? pair.source : pair.destination; }
};

ffi::ErrorOr<IdLists> decode_ids(ffi::Buffer<ffi::S32> sources, ffi::Buffer<ffi::S32> destinations,
                                 CopyAttribute attribute);

ffi::ErrorOr<PairList> decode_pairs(ffi::Buffer<ffi::S32> operand);

// Decodes the arrays and checks every size, so that no id in range can leave a buffer.
//   args: strided arrays, then dense arrays; rets: the written side.
ffi::ErrorOr<BlockCopy> decode_copy(ffi::RemainingArgs args, ffi::RemainingRets rets,
                                    CopyAttribute attribute);

// Checks that the list is HostIds that the host may read now.
ffi::Error check_host_ids(const IdList& list, const char* name);

// Pairs that may be copied, of ids that the host may read; `refused` gets the others, padding
// apart. They last until this thread plans again.
std::span<const BlockPair> select_pairs(const IdLists& ids, std::vector<ErrorEntry>* refused);

// The CPU backend's copy of planned pairs.
ffi::Error copy_pairs_cpu(ffi::Buffer<ffi::S32> planned, ffi::RemainingArgs args,
                          ffi::RemainingRets rets, CopyAttribute attribute);

}  // namespace jaxkv::transfer
