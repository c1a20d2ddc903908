// Comparison of values computed on the device with bounds that are fixed while tracing.
#include <algorithm>

#include "common/bounds.h"
#include "common/cuda_check.h"
#include "common/error_ring.cuh"

namespace jaxkv {
namespace {

struct Bounds {
  int32_t codes[kMaxBounds];
  int32_t limits[kMaxBounds];
};

__global__ void check_bounds(const int32_t* values, const __grid_constant__ Bounds bounds,
                             ErrorRings* errors) {
  const int32_t value = values[threadIdx.x], limit = bounds.limits[threadIdx.x];
  if (value > limit) {
    record_error(errors, ErrorCode::kBoundExceeded, bounds.codes[threadIdx.x], value, limit);
  }
}

// Everything that may allocate memory or load a module is done before the first execution.
ffi::Error prepare(int32_t device, ffi::RemainingArgs, ffi::RemainingRets,
                   ffi::Dictionary attributes) {
  cudaFuncAttributes loaded;
  JAXKV_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&loaded, check_bounds));
  const auto codes = attributes.get<Int64s>("codes");
  return prepare_rings(device, codes.has_value() ? scope_of_bounds(*codes) : Scope::kDefault);
}

ffi::Error check_bounds_cuda(cudaStream_t stream, int32_t device, ffi::Buffer<ffi::S32> values,
                             ffi::AnyBuffer carry, ffi::Result<ffi::AnyBuffer> result, Int64s codes,
                             Int64s limits) {
  if (auto error = check_counts(values, codes, limits); error.failure()) return error;
  // In loops, including those of vmap, XLA may place the result of a slice in another buffer.
  if (result->untyped_data() != carry.untyped_data()) {
    JAXKV_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(result->untyped_data(), carry.untyped_data(),
                                               carry.size_bytes(), cudaMemcpyDeviceToDevice,
                                               stream));
  }
  Bounds bounds;
  std::transform(codes.begin(), codes.end(), bounds.codes, bound_of);
  std::transform(limits.begin(), limits.end(), bounds.limits, [](int64_t limit) {
    return static_cast<int32_t>(std::clamp<int64_t>(limit, INT32_MIN, INT32_MAX));
  });
  check_bounds<<<1, codes.size(), 0, stream>>>(values.typed_data(), bounds,
                                               device_rings(device, scope_of_bounds(codes)));
  JAXKV_RETURN_IF_CUDA_ERROR(cudaGetLastError());
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    PrepareBounds, prepare,
    ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(CheckBoundsKernel, check_bounds_cuda,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<Int64s>("codes")
                                  .Attr<Int64s>("limits"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxkv
