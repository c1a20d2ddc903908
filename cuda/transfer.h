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

#include "page_errors.h"
#include "xla/ffi/api/ffi.h"

namespace jaxkv {

namespace ffi = xla::ffi;

// The attribute `geometry`, in the order in which transfer.py writes it.
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

// Ids as an operand holds them; maybe device memory, so not to be read before open_ids.
struct IdList {
  std::span<const int32_t> words;
  size_t header;  // words before the ids: kHostIdsHeader for HostIds, else 0

  const int32_t* ids() const { return words.data() + header; }
  size_t size() const { return words.size() - header; }
};

struct BlockCopy {
  bool to_dense = true;
  bool reports_ids = true;  // of several copies with the same ids, one reports those refused
  int num_sms = 1;
  CopyGeometry geometry{};
  IdList source_ids{}, destination_ids{};
  std::vector<std::byte*> dense{}, strided{};  // first byte of block 0, per buffer
  std::byte* pairs_scratch = nullptr;   // int32[2 + 2n]: number of valid pairs, unused, the pairs
  std::byte* counts_scratch = nullptr;  // int32[blocks of the destination]

  int32_t num_sources() const {
    return static_cast<int32_t>(to_dense ? geometry.num_strided : geometry.num_dense);
  }
  int32_t num_destinations() const {
    return static_cast<int32_t>(to_dense ? geometry.num_dense : geometry.num_strided);
  }
};

// Decodes the operands and checks every size, so that no id in range can leave a buffer.
//   args: strided arrays, then dense arrays; rets: the written side, pairs, counts.
ffi::ErrorOr<BlockCopy> decode_copy(ffi::Buffer<ffi::S32> source_ids,
                                    ffi::Buffer<ffi::S32> destination_ids, ffi::RemainingArgs args,
                                    ffi::RemainingRets rets, ffi::Dictionary attributes);

struct BlockPair {
  int32_t dense, strided;
};

// Pairs that may be copied, of opened ids; `refused` gets the others, padding apart.
std::vector<BlockPair> plan_on_host(const BlockCopy& copy, std::vector<PageErrorEntry>* refused);

// Checks that the host may read HostIds now; lists without a header are host memory already.
ffi::Error open_ids(const IdList& list, const char* name);

// Binding shared by every handler of a page copy.
#define JAXKV_COPY_BINDING(ffi_binding)    \
  ffi_binding.Arg<ffi::Buffer<ffi::S32>>() \
      .Arg<ffi::Buffer<ffi::S32>>()        \
      .RemainingArgs()                     \
      .RemainingRets()                     \
      .Attrs()

}  // namespace jaxkv
