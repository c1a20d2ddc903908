// The CPU backend's page copy: the same call, done by memcpy before the handler returns.
#include <algorithm>
#include <cstring>

#include "transfer.h"

namespace jaxkv {
namespace {

void copy_block(const BlockCopy& copy, size_t buffer, BlockPair pair) {
  const CopyGeometry& g = copy.geometry;
  std::byte* dense = copy.dense[buffer] + copy.dense_block(pair) * g.block_bytes;
  std::byte* strided = copy.strided[buffer] + copy.strided_block(pair) * g.page_stride;
  for (int64_t i0 = 0; i0 < g.count0; ++i0) {
    for (int64_t i1 = 0; i1 < g.count1; ++i1, dense += g.run_bytes) {
      std::byte* run = strided + g.run_offset(i0, i1);
      std::memcpy(copy.to_dense ? dense : run, copy.to_dense ? run : dense, g.run_bytes);
    }
  }
}

// Fails the step on the first wrong id, before anything is copied.
ffi::Error plan_pairs(ffi::Buffer<ffi::S32> source_ids, ffi::Buffer<ffi::S32> destination_ids,
                      ffi::ResultBuffer<ffi::S32> planned, ffi::ResultBuffer<ffi::S32> /*counts*/,
                      ffi::Dictionary attributes) {
  const auto ids = decode_ids(source_ids, destination_ids, attributes);
  if (!ids.has_value()) return ids.error();
  const auto list = decode_pairs(*planned);
  if (!list.has_value()) return list.error();
  if (auto error = open_ids(ids->sources, "the source"); error.failure()) return error;
  if (auto error = open_ids(ids->destinations, "the destination"); error.failure()) return error;
  std::vector<PageErrorEntry> refused;
  const auto pairs = plan_on_host(*ids, &refused);
  if (!refused.empty()) {
    return ffi::Error::InvalidArgument("PageIndexError: " + describe(refused.front()) + " (" +
                                       std::to_string(refused.size()) +
                                       " entries refused, nothing copied)");
  }
  if (pairs.size() > list->capacity) return ffi::Error::Internal("jaxkv: too many pairs");
  *list->count = static_cast<int32_t>(pairs.size());
  std::copy(pairs.begin(), pairs.end(), list->pairs);
  return ffi::Error::Success();
}

}  // namespace

ffi::Error copy_pairs_on_host(ffi::Buffer<ffi::S32> planned, ffi::RemainingArgs args,
                              ffi::RemainingRets rets, ffi::Dictionary attributes) {
  const auto copy = decode_copy(args, rets, attributes);
  if (!copy.has_value()) return copy.error();
  const auto list = decode_pairs(planned);
  if (!list.has_value()) return list.error();
  for (int32_t i = 0; i < *list->count; ++i) {
    for (size_t b = 0; b < copy->dense.size(); ++b) copy_block(*copy, b, list->pairs[i]);
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(PlanPairsHost, plan_pairs,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CopyBlocksHost, copy_pairs_on_host,
    ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::S32>>().RemainingArgs().RemainingRets().Attrs());

}  // namespace jaxkv
