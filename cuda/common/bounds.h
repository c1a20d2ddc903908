// Argument checks of the bounds handlers, shared by CUDA and CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace jaxkv {

namespace ffi = xla::ffi;

using Int64s = ffi::Span<const int64_t>;

inline constexpr size_t kMaxBounds = 16;

inline ffi::Error check_counts(ffi::Buffer<ffi::S32> values, Int64s codes, Int64s limits) {
  const size_t count = values.element_count();
  if (count && count <= kMaxBounds && codes.size() == count && limits.size() == count) {
    return ffi::Error::Success();
  }
  return ffi::Error::InvalidArgument(
      "jaxkv check_bounds: " + std::to_string(count) + " values, " + std::to_string(codes.size()) +
      " codes, " + std::to_string(limits.size()) + " limits: must be equal numbers from 1 to " +
      std::to_string(kMaxBounds));
}

}  // namespace jaxkv
