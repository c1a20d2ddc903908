// CUDA handlers of sparse rows: a look-up and a copy, one launch each. From compute capability 9.0
// on the copy is a programmatic dependent launch: its thread blocks already wait on the SMs when
// the look-up ends.
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

// Shared memory of the largest request, in bytes. Every GPU from compute capability 8.0 on has at
// least 99 KiB for a thread block.
constexpr int kMostShared = 4 * kBuckets + 4 * kMaxSlots + 4 * 2 * kMaxIds + 2 * 2 * kMaxIds;
static_assert(kMostShared <= 98 * 1024);

template <bool kAppend>
auto* look_up_kernel(bool small) {
  return small ? look_up<kAppend, Small> : look_up<kAppend, Large>;
}

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
  for (const auto kernel : {look_up_kernel<false>(false), look_up_kernel<false>(true),
                            look_up_kernel<true>(false), look_up_kernel<true>(true)}) {
    JAXKV_RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(kernel, kShared, kMostShared));
  }
  done[device].store(true);
  return ffi::Error::Success();
}

CopyParams copy_params(const RowCall& call) {
  const RowBatch& b = call.batch;
  return {call.addresses,
          b.moves,
          b.counts,
          static_cast<uint32_t>(b.num_requests),
          Divisor(b.num_ids),
          static_cast<uint32_t>(b.slots),
          Divisor(call.addresses.row_bytes / kWordBytes),
          Divisor(lines_of_row(call.addresses))};
}

// Launches a copy after `look_up` on the same stream.
ffi::Error launch_after_look_up(cudaStream_t stream, int32_t device, void (*kernel)(CopyParams),
                                uint32_t blocks, uint32_t shared, const CopyParams& params) {
  int major;
  JAXKV_RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kCopyThreads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = major >= 9 ? 1 : 0;
  JAXKV_RETURN_IF_CUDA_ERROR(cudaLaunchKernelEx(&config, kernel, params));
  return ffi::Error::Success();
}

template <bool kAppend>
ffi::Error launch_look_up(cudaStream_t stream, int32_t device, const RowCall& call) {
  const LookUpParams params{call.batch,
                            {call.batch.slots, call.batch.num_ids, kLookUpThreads},
                            device_rings(device, call.scope)};
  const auto kernel = look_up_kernel<kAppend>(params.size.is_small());
  kernel<<<call.batch.num_requests, kLookUpThreads, params.size.bytes(), stream>>>(params);
  JAXKV_RETURN_IF_CUDA_ERROR(cudaGetLastError());
  return ffi::Error::Success();
}

ffi::Error fetch_cuda(cudaStream_t stream, int32_t device, ffi::RemainingArgs args,
                      ffi::RemainingRets rets, ffi::Dictionary attributes) {
  const auto call = decode_rows(/*append=*/false, args, rets, attributes);
  if (!call.has_value()) return call.error();
  if (auto error = launch_look_up<false>(stream, device, *call); error.failure()) return error;
  const CopyParams params = copy_params(*call);
  constexpr uint32_t kLines = kCopyThreads / kLineWords;  // of a thread block, by one load
  const uint32_t most = call->batch.num_ids * params.num_requests * params.row_lines.value();
  const uint32_t blocks =
      std::min((most + kLines - 1) / kLines, static_cast<uint32_t>(call->num_sms));
  const uint32_t shared = (params.num_requests + 1) * sizeof(uint32_t);
  return launch_after_look_up(stream, device, copy_missing, blocks, shared, params);
}

uint32_t blocks_of_added(const RowCall& call, const CopyParams& params) {
  const uint32_t words = call.batch.num_ids * params.num_requests * params.row_words.value();
  return std::min((words + kCopyThreads - 1) / kCopyThreads, static_cast<uint32_t>(call.num_sms));
}

ffi::Error append_cuda(cudaStream_t stream, int32_t device, ffi::RemainingArgs args,
                       ffi::RemainingRets rets, ffi::Dictionary attributes) {
  const auto call = decode_rows(/*append=*/true, args, rets, attributes);
  if (!call.has_value()) return call.error();
  if (auto error = launch_look_up<true>(stream, device, *call); error.failure()) return error;
  const CopyParams params = copy_params(*call);
  return launch_after_look_up(stream, device, copy_added<false>, blocks_of_added(*call, params), 0,
                              params);
}

ffi::Error write_added_cuda(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                            ffi::Dictionary attributes) {
  const auto call = decode_added_rows(args, rets, attributes);
  if (!call.has_value()) return call.error();
  const CopyParams params = copy_params(*call);
  copy_added<true><<<blocks_of_added(*call, params), kCopyThreads, 0, stream>>>(params);
  JAXKV_RETURN_IF_CUDA_ERROR(cudaGetLastError());
  return ffi::Error::Success();
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
