// Test hook: a copy on a stream without any ordering, the negative control of the ordering tests.
#include <array>

#include "common/cuda_check.h"
#include "common/device.h"
#include "common/error_ring.cuh"
#include "transfer/block_copy.h"
#include "transfer/copy_kernel.h"

namespace jaxkv::testing {
namespace {

namespace ffi = xla::ffi;
using transfer::CopyAttribute;

ffi::Error copy_unordered(int32_t device, ffi::Buffer<ffi::S32> source_ids,
                          ffi::Buffer<ffi::S32> destination_ids, ffi::RemainingArgs args,
                          ffi::RemainingRets rets, CopyAttribute attribute) {
  static std::array<cudaStream_t, kMaxDevices> streams{};
  cudaStream_t& stream = streams[device];
  if (!stream) {
    JAXKV_RETURN_IF_CUDA_ERROR(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    add_own_stream(device, stream);
  }
  const auto copy = transfer::decode_copy(args, rets, attribute);
  if (!copy.has_value()) return copy.error();
  const auto ids = transfer::decode_ids(source_ids, destination_ids, attribute);
  if (!ids.has_value()) return ids.error();
  return transfer::launch_copy(stream, *copy, *ids, device_rings(device, ids->scope));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(CopyBlocksUnordered, copy_unordered,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<CopyAttribute>("copy"));

}  // namespace jaxkv::testing
