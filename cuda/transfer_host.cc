// The CPU backend's page copy: the same call, done by memcpy before the handler returns.
#include <cstring>

#include "transfer.h"

namespace jaxkv {
namespace {

void copy_block(const BlockCopy& copy, size_t buffer, BlockPair pair) {
  const CopyGeometry& g = copy.geometry;
  std::byte* dense = copy.dense[buffer] + pair.dense * g.block_bytes;
  std::byte* strided = copy.strided[buffer] + pair.strided * g.page_stride;
  for (int64_t i0 = 0; i0 < g.count0; ++i0) {
    for (int64_t i1 = 0; i1 < g.count1; ++i1, dense += g.run_bytes) {
      std::byte* run = strided + g.run_offset(i0, i1);
      std::memcpy(copy.to_dense ? dense : run, copy.to_dense ? run : dense, g.run_bytes);
    }
  }
}

ffi::Error copy_blocks(ffi::Buffer<ffi::S32> source_ids, ffi::Buffer<ffi::S32> destination_ids,
                       ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary attributes) {
  const auto copy = decode_copy(source_ids, destination_ids, args, rets, attributes);
  if (!copy.has_value()) return copy.error();
  if (auto error = open_ids(copy->source_ids, "the source"); error.failure()) return error;
  if (auto error = open_ids(copy->destination_ids, "the destination"); error.failure()) {
    return error;
  }
  std::vector<PageErrorEntry> refused;
  const auto pairs = plan_on_host(*copy, &refused);
  if (!refused.empty()) {
    return ffi::Error::InvalidArgument("PageIndexError: " + describe(refused.front()) + " (" +
                                       std::to_string(refused.size()) +
                                       " entries refused, nothing copied)");
  }
  for (const auto& pair : pairs) {
    for (size_t b = 0; b < copy->dense.size(); ++b) copy_block(*copy, b, pair);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(CopyBlocksHost, copy_blocks, JAXKV_COPY_BINDING(ffi::Ffi::Bind()));

}  // namespace jaxkv
