// CUDA handlers of sparse rows: a look-up and a copy, each one launch.
#include <algorithm>
#include <array>
#include <atomic>

#include "common/cuda_check.h"
#include "common/error_ring.cuh"
#include "common/error_scope.h"
#include "sparse/copy_rows.cuh"
#include "sparse/look_up.cuh"

namespace jaxkv::sparse {
namespace {

// The largest request; every GPU from compute capability 8.0 on has 99 KiB for a thread block.
constexpr int kMostShared = 4 * kMaxSlots + 4 * 2 * kMaxIds + 2 * 2 * kMaxIds;
static_assert(kMostShared <= 96 * 1024);

// Everything that may allocate memory or load a module is done before the first execution.
ffi::Error prepare(int32_t device, ffi::RemainingArgs, ffi::RemainingRets,
                   ffi::Dictionary attributes) {
  static std::array<std::atomic<bool>, kMaxDevices> done{};  // called before every execution
  const Scope scope = scope_of_call(attributes);
  if (auto error = prepare_rings(device, scope); error.failure()) return error;
  if (done[device].load()) return ffi::Error::Success();
  cudaFuncAttributes loaded;
  JAXKV_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&loaded, copy_missing));
  JAXKV_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&loaded, copy_added<false>));
  JAXKV_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&loaded, copy_added<true>));
  constexpr auto kShared = cudaFuncAttributeMaxDynamicSharedMemorySize;
  JAXKV_RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(look_up<false>, kShared, kMostShared));
  JAXKV_RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(look_up<true>, kShared, kMostShared));
  done[device].store(true);
  return ffi::Error::Success();
}

CopyParams copy_params(const RowCall& call) {
  const RowBatch& b = call.batch;
  return {call.addresses,
          b.moves,
          b.counts,
          static_cast<uint32_t>(b.num_requests),
          static_cast<uint32_t>(b.num_ids),
          static_cast<uint32_t>(b.slots),
          static_cast<uint32_t>(call.addresses.row_bytes / kWordBytes)};
}

template <bool kAppend>
ffi::Error launch_look_up(cudaStream_t stream, int32_t device, const RowCall& call) {
  const LookUpParams params{
      call.batch, {call.batch.slots, call.batch.num_ids}, device_rings(device, call.scope)};
  look_up<kAppend>
      <<<call.batch.num_requests, kLookUpThreads, params.size.bytes(), stream>>>(params);
  JAXKV_RETURN_IF_CUDA_ERROR(cudaGetLastError());
  return ffi::Error::Success();
}

ffi::Error fetch_cuda(cudaStream_t stream, int32_t device, ffi::RemainingArgs args,
                      ffi::RemainingRets rets, ffi::Dictionary attributes) {
  const auto call = decode_rows(/*append=*/false, args, rets, attributes);
  if (!call.has_value()) return call.error();
  if (auto error = launch_look_up<false>(stream, device, *call); error.failure()) return error;
  const CopyParams params = copy_params(*call);
  const uint32_t most = params.num_requests * params.num_ids * params.row_words;
  const uint32_t tiles = (most + kTileWords - 1) / kTileWords, warps = kCopyThreads / 32;
  const uint32_t blocks =
      std::min((tiles + warps - 1) / warps, static_cast<uint32_t>(call->num_sms));
  const uint32_t shared = (params.num_requests + 1) * sizeof(uint32_t);
  copy_missing<<<blocks, kCopyThreads, shared, stream>>>(params);
  JAXKV_RETURN_IF_CUDA_ERROR(cudaGetLastError());
  return ffi::Error::Success();
}

template <bool kToPool>
ffi::Error launch_copy_added(cudaStream_t stream, const RowCall& call) {
  const CopyParams params = copy_params(call);
  const uint32_t words = params.num_requests * params.num_ids * params.row_words;
  const uint32_t blocks =
      std::min((words + kCopyThreads - 1) / kCopyThreads, static_cast<uint32_t>(call.num_sms));
  copy_added<kToPool><<<blocks, kCopyThreads, 0, stream>>>(params);
  JAXKV_RETURN_IF_CUDA_ERROR(cudaGetLastError());
  return ffi::Error::Success();
}

ffi::Error append_cuda(cudaStream_t stream, int32_t device, ffi::RemainingArgs args,
                       ffi::RemainingRets rets, ffi::Dictionary attributes) {
  const auto call = decode_rows(/*append=*/true, args, rets, attributes);
  if (!call.has_value()) return call.error();
  if (auto error = launch_look_up<true>(stream, device, *call); error.failure()) return error;
  return launch_copy_added<false>(stream, *call);
}

ffi::Error write_added_cuda(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                            ffi::Dictionary attributes) {
  const auto call = decode_added_rows(args, rets, attributes);
  if (!call.has_value()) return call.error();
  return launch_copy_added<true>(stream, *call);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    PrepareSparse, prepare,
    ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SparseFetchKernel, fetch_cuda,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(SparseAppendKernel, append_cuda,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(SparseWriteAddedKernel, write_added_cuda,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxkv::sparse
