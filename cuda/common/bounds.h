// Argument checks of the bounds handlers, shared by CUDA and CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/error_ring.h"
#include "xla/ffi/api/ffi.h"

namespace jaxkv {

namespace ffi = xla::ffi;

using Int64s = ffi::Span<const int64_t>;

inline constexpr size_t kMaxBounds = 16;

// An entry of `codes`: the code of the bound's name, and above it the scope.
inline int32_t bound_of(int64_t code) { return static_cast<int32_t>(code & INT32_MAX); }
inline Scope scope_of_bounds(Int64s codes) {
  return codes.size() ? static_cast<Scope>(codes.begin()[0] >> 32) : Scope::kDefault;
}

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
