// Page copies by a CUDA kernel: the FFI handlers, and plan_pairs.
//
// A copy of up to kInlineIds ids is one call, whose kernel checks the ids itself. For more ids, and
// for the Pallas kernels, plan_pairs checks the ids and lists the pairs to copy. These are two FFI
// calls because XLA places all results of a call that writes host memory in host memory, where the
// atomics of the plan would cross the link.
#include <algorithm>
#include <array>
#include <atomic>

#include "common/cuda_check.h"
#include "transfer/copy_kernel.h"
#include "transfer/id_check.cuh"

namespace jaxkv::transfer {
namespace {

constexpr int kPlanThreads = 512;
constexpr int kPlanReads = 8;
constexpr uint32_t kPlanShare = 1024;  // ids per thread block, up to kPlanBlocks blocks
constexpr uint32_t kPlanBlocks = 128;
constexpr uint32_t kPlanMaxShare = ShareSize::kMaxCapacity / 2;  // fits every GPU's shared memory

struct PlanParams {
  IdParams ids;
  ShareSize share;
  int32_t* num_pairs;  // initialized to 0
  BlockPair* pairs;
};

__device__ Claim plan_share(uint32_t num_pairs) {
  const uint32_t part = (num_pairs + gridDim.x - 1) / gridDim.x;
  return {{min(blockIdx.x * part, num_pairs), min((blockIdx.x + 1) * part, num_pairs)}, false};
}

__global__ void __launch_bounds__(kPlanThreads) plan_pairs(const __grid_constant__ PlanParams p) {
  extern __shared__ __align__(16) std::byte shared[];
  Share<kPlanReads> share(p.ids, p.share, shared);
  Span span = plan_share(p.ids.num_ids).pairs;
  share.list(span);
  if (!share.all_valid()) span = share.regroup(blockIdx.x == 0, plan_share).pairs;
  for (uint32_t k = threadIdx.x; k < span.size(); k += kPlanThreads) {
    // Order does not matter: no two pairs have the same destination.
    const BlockPair pair = share.pairs()[k];
    if (pair.destination >= 0) p.pairs[atomicAdd(p.num_pairs, 1)] = pair;
  }
}

ffi::Error launch_plan(cudaStream_t stream, const IdLists& ids, const PairList& list,
                       ErrorRings* errors) {
  const auto num_ids = static_cast<uint32_t>(ids.sources.size());
  auto shares_of = [&](uint32_t size) { return std::max(1u, (num_ids + size - 1) / size); };
  const uint32_t blocks =
      std::max(std::min(shares_of(kPlanShare), kPlanBlocks), shares_of(kPlanMaxShare));
  const PlanParams p{
      .ids = id_params(ids, errors),
      .share = ShareSize((num_ids + blocks - 1) / blocks),
      .num_pairs = list.count,
      .pairs = list.pairs,
  };
  JAXKV_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(list.count, 0, sizeof *list.count, stream));
  plan_pairs<<<blocks, kPlanThreads, p.share.bytes(), stream>>>(p);
  JAXKV_RETURN_IF_CUDA_ERROR(cudaGetLastError());
  return ffi::Error::Success();
}

// Moves HostIds to `scratch`, int32[2n]: every thread block reads all ids, so that the traffic on
// the link would be their size times the number of thread blocks.
ffi::Error stage_host_ids(cudaStream_t stream, IdLists& ids, ffi::Buffer<ffi::S32> scratch) {
  if (scratch.element_count() < 2 * ids.sources.size()) {
    return ffi::Error::InvalidArgument("jaxkv plan_pairs: scratch of " +
                                       std::to_string(scratch.element_count()) + " words for " +
                                       std::to_string(ids.sources.size()) + " ids");
  }
  int32_t* staged = scratch.typed_data();
  for (IdList* list : {&ids.sources, &ids.destinations}) {
    const size_t num_ids = list->size();
    if (list->is_host_ids() && num_ids > 0) {
      JAXKV_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(staged, list->ids(), num_ids * sizeof(int32_t),
                                                 cudaMemcpyDefault, stream));
      *list = {{staged, num_ids}, 0, num_ids};
    }
    staged += num_ids;
  }
  return ffi::Error::Success();
}

// ---------------------------------------------------------------------------------------------
// Handlers

// Everything that may allocate memory or load a module is done before the first execution.
ffi::Error prepare_device(int32_t device, ffi::RemainingArgs, ffi::RemainingRets,
                          ffi::Dictionary attributes) {
  static std::array<std::atomic<bool>, kMaxDevices> done{};  // called before every execution
  if (auto error = prepare_copy_kernel(device); error.failure()) return error;
  Scope scope = Scope::kDefault;
  if (const auto copy = attributes.get<CopyAttribute>("copy"); copy.has_value()) {
    scope = scope_of_copy(*copy);
  } else if (const auto copies = attributes.get<CopyAttribute>("copies"); copies.has_value()) {
    scope = scope_of_copies(*copies);
  }
  if (auto error = prepare_rings(device, scope); error.failure()) return error;
  if (done[device].load()) return ffi::Error::Success();
  JAXKV_RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(
      plan_pairs, cudaFuncAttributeMaxDynamicSharedMemorySize, ShareSize(kPlanMaxShare).bytes()));
  done[device].store(true);
  return ffi::Error::Success();
}

ffi::Error plan_pairs_cuda(cudaStream_t stream, int32_t device, ffi::Buffer<ffi::S32> source_ids,
                           ffi::Buffer<ffi::S32> destination_ids,
                           ffi::ResultBuffer<ffi::S32> planned, ffi::RemainingRets scratch,
                           CopyAttribute attribute) {
  auto ids = decode_ids(source_ids, destination_ids, attribute);
  if (!ids.has_value()) return ids.error();
  const auto list = decode_pairs(*planned);
  if (!list.has_value()) return list.error();
  if (list->capacity < ids->sources.size()) {
    return ffi::Error::InvalidArgument("jaxkv plan_pairs: " + std::to_string(ids->sources.size()) +
                                       " ids exceed the plan's capacity of " +
                                       std::to_string(list->capacity));
  }
  if (scratch.size() > 0) {
    auto words = scratch.get<ffi::Buffer<ffi::S32>>(0);
    if (!words.has_value()) return words.error();
    if (auto error = stage_host_ids(stream, *ids, **words); error.failure()) return error;
  }
  return launch_plan(stream, *ids, *list, device_rings(device, ids->scope));
}

ffi::Error copy_by_kernel(cudaStream_t stream, int32_t device, ffi::Buffer<ffi::S32> source_ids,
                          ffi::Buffer<ffi::S32> destination_ids, ffi::RemainingArgs args,
                          ffi::RemainingRets rets, CopyAttribute attribute) {
  const auto copy = decode_copy(args, rets, attribute);
  if (!copy.has_value()) return copy.error();
  const auto ids = decode_ids(source_ids, destination_ids, attribute);
  if (!ids.has_value()) return ids.error();
  return launch_copy(stream, *copy, *ids, device_rings(device, ids->scope));
}

ffi::Error copy_pairs_by_kernel(cudaStream_t stream, ffi::Buffer<ffi::S32> planned,
                                ffi::RemainingArgs args, ffi::RemainingRets rets,
                                CopyAttribute attribute) {
  const auto copy = decode_copy(args, rets, attribute);
  if (!copy.has_value()) return copy.error();
  const auto list = decode_pairs(planned);
  if (!list.has_value()) return list.error();
  return launch_copy(stream, *copy, *list);
}

ffi::Error copy_groups_by_kernel(cudaStream_t stream, int32_t device, ffi::RemainingArgs args,
                                 ffi::RemainingRets rets, CopyAttribute attribute) {
  const auto copies = decode_copies(args, rets, attribute);
  if (!copies.has_value()) return copies.error();
  return launch_copies(stream, *copies, device_rings(device, scope_of_copies(attribute)));
}

}  // namespace

using Stream = ffi::PlatformStream<cudaStream_t>;
using Int32s = ffi::Buffer<ffi::S32>;

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    PrepareDevice, prepare_device,
    ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(PlanPairsKernel, plan_pairs_cuda,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<Int32s>()
                                  .Arg<Int32s>()
                                  .Ret<Int32s>()
                                  .RemainingRets()
                                  .Attr<CopyAttribute>("copy"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(CopyBlocksKernel, copy_by_kernel,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<Int32s>()
                                  .Arg<Int32s>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<CopyAttribute>("copy"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(CopyPairsKernel, copy_pairs_by_kernel,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<Int32s>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<CopyAttribute>("copy"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(CopyGroupsKernel, copy_groups_by_kernel,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<CopyAttribute>("copies"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxkv::transfer
