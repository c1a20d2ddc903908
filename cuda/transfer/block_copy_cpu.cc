// The CPU backend's page copy: a memcpy that completes before the handler returns.
#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "transfer/block_copy.h"

namespace jaxkv::transfer {
namespace {

void copy_block(const BlockCopy& copy, size_t buffer, BlockPair pair) {
  const CopyGeometry& g = copy.geometry;
  std::byte* dense = copy.dense[buffer] + copy.dense_block(pair) * g.dense_stride;
  std::byte* strided = copy.strided[buffer] + copy.strided_block(pair) * g.page_stride;
  for (int64_t i0 = 0; i0 < g.count0; ++i0) {
    for (int64_t i1 = 0; i1 < g.count1; ++i1, dense += g.run_bytes) {
      std::byte* run = strided + g.run_offset(i0, i1);
      std::memcpy(copy.to_dense ? dense : run, copy.to_dense ? run : dense, g.run_bytes);
    }
  }
}

// Fails the step at the first invalid id, before anything is copied.
ffi::ErrorOr<SelectedPairs> check_ids(const IdLists& ids) {
  for (const auto& [list, name] :
       {std::pair(ids.sources, "the source"), std::pair(ids.destinations, "the destination")}) {
    if (!list.is_host_ids()) continue;  // any list is host memory here
    if (auto error = check_host_ids(list, name); error.failure()) return ffi::Unexpected(error);
  }
  RejectedIds rejected;
  auto selected = select_pairs(ids, &rejected);
  if (rejected.count == 0) return selected;
  return ffi::Unexpected(ffi::Error::InvalidArgument(
      "PageIndexError: " + describe(rejected.first.front()) +
      " (entries rejected: " + std::to_string(rejected.count) + ", nothing copied)"));
}

ffi::ErrorOr<SelectedPairs> check_ids(ffi::Buffer<ffi::S32> source_ids,
                                      ffi::Buffer<ffi::S32> destination_ids,
                                      CopyAttribute attribute) {
  const auto ids = decode_ids(source_ids, destination_ids, attribute);
  if (!ids.has_value()) return ffi::Unexpected(ids.error());
  return check_ids(*ids);
}

ffi::Error plan_pairs(ffi::Buffer<ffi::S32> source_ids, ffi::Buffer<ffi::S32> destination_ids,
                      ffi::ResultBuffer<ffi::S32> planned, ffi::RemainingRets /*scratch*/,
                      CopyAttribute attribute) {
  const auto list = decode_pairs(*planned);
  if (!list.has_value()) return list.error();
  const auto selected = check_ids(source_ids, destination_ids, attribute);
  if (!selected.has_value()) return selected.error();
  const auto pairs = selected->pairs;
  if (pairs.size() > list->capacity) {
    return ffi::Error::Internal("jaxkv plan_pairs: " + std::to_string(pairs.size()) +
                                " pairs exceed the plan's capacity of " +
                                std::to_string(list->capacity));
  }
  *list->count = static_cast<int32_t>(pairs.size());
  std::copy(pairs.begin(), pairs.end(), list->pairs);
  return ffi::Error::Success();
}

void copy_all(const BlockCopy& copy, std::span<const BlockPair> pairs) {
  for (const BlockPair pair : pairs) {
    for (size_t b = 0; b < copy.dense.size(); ++b) copy_block(copy, b, pair);
  }
}

ffi::Error copy_blocks(ffi::Buffer<ffi::S32> source_ids, ffi::Buffer<ffi::S32> destination_ids,
                       ffi::RemainingArgs args, ffi::RemainingRets rets, CopyAttribute attribute) {
  const auto copy = decode_copy(args, rets, attribute);
  if (!copy.has_value()) return copy.error();
  const auto selected = check_ids(source_ids, destination_ids, attribute);
  if (!selected.has_value()) return selected.error();
  copy_all(*copy, selected->pairs);
  return ffi::Error::Success();
}

// Checks the ids of all groups before anything is copied.
ffi::Error copy_groups(ffi::RemainingArgs args, ffi::RemainingRets rets, CopyAttribute attribute) {
  const auto copies = decode_copies(args, rets, attribute);
  if (!copies.has_value()) return copies.error();
  std::vector<std::vector<BlockPair>> pairs_of_groups;
  for (const GroupCopy& entry : *copies) {
    if (!entry.new_ids || entry.pairs.pairs) continue;
    const auto selected = check_ids(entry.ids);
    if (!selected.has_value()) return selected.error();
    pairs_of_groups.emplace_back(selected->pairs.begin(), selected->pairs.end());
  }
  auto next = pairs_of_groups.begin();
  std::span<const BlockPair> pairs;
  for (const GroupCopy& entry : *copies) {
    if (entry.pairs.pairs) {
      pairs = {entry.pairs.pairs, static_cast<size_t>(*entry.pairs.count)};
    } else if (entry.new_ids) {
      pairs = *next++;
    }
    copy_all(entry.copy, pairs);
  }
  return ffi::Error::Success();
}

}  // namespace

ffi::Error copy_pairs_cpu(ffi::Buffer<ffi::S32> planned, ffi::RemainingArgs args,
                          ffi::RemainingRets rets, CopyAttribute attribute) {
  const auto copy = decode_copy(args, rets, attribute);
  if (!copy.has_value()) return copy.error();
  const auto list = decode_pairs(planned);
  if (!list.has_value()) return list.error();
  copy_all(*copy, {list->pairs, static_cast<size_t>(*list->count)});
  return ffi::Error::Success();
}

using Int32s = ffi::Buffer<ffi::S32>;

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    PlanPairsCpu, plan_pairs,
    ffi::Ffi::Bind().Arg<Int32s>().Arg<Int32s>().Ret<Int32s>().RemainingRets().Attr<CopyAttribute>(
        "copy"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(CopyBlocksCpu, copy_blocks,
                              ffi::Ffi::Bind()
                                  .Arg<Int32s>()
                                  .Arg<Int32s>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<CopyAttribute>("copy"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CopyPairsCpu, copy_pairs_cpu,
    ffi::Ffi::Bind().Arg<Int32s>().RemainingArgs().RemainingRets().Attr<CopyAttribute>("copy"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CopyGroupsCpu, copy_groups,
    ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<CopyAttribute>("copies"));

}  // namespace jaxkv::transfer
