// The CPU backend's bounds check: a violation fails the step immediately.
#include <cstring>

#include "common/bounds.h"

namespace jaxkv {
namespace {

ffi::Error check_bounds_cpu(ffi::Buffer<ffi::S32> values, ffi::AnyBuffer carry,
                            ffi::Result<ffi::AnyBuffer> result, Int64s codes, Int64s limits) {
  if (auto error = check_counts(values, codes, limits); error.failure()) return error;
  if (result->untyped_data() != carry.untyped_data()) {
    std::memcpy(result->untyped_data(), carry.untyped_data(), carry.size_bytes());
  }
  for (size_t i = 0; i < codes.size(); ++i) {
    const int32_t value = values.typed_data()[i];
    if (value <= limits[i]) continue;
    return ffi::Error::InvalidArgument("BoundError: " +
                                       describe({.fault = Fault(ErrorCode::kBoundExceeded).word,
                                                 .position = bound_of(codes[i]),
                                                 .id = value,
                                                 .limit = static_cast<int32_t>(limits[i]),
                                                 .sequence = 0}));
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(CheckBoundsCpu, check_bounds_cpu,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<Int64s>("codes")
                                  .Attr<Int64s>("limits"));

}  // namespace jaxkv
