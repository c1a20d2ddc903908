// Check that XLA has placed results in their operands' buffers.
#pragma once

#include <string>

#include "xla/ffi/api/ffi.h"

namespace jaxkv {

namespace ffi = xla::ffi;

[[gnu::cold, gnu::noinline]] inline ffi::Error not_aliased(size_t operand, size_t result) {
  return ffi::Error::Internal("jaxkv: operand " + std::to_string(operand) + " and result " +
                              std::to_string(result) +
                              " must share a buffer, but XLA has allocated two: bytes that the "
                              "call does not write would be lost");
}

// Checks that the results from `first_ret` on share the buffers of the operands from `first_arg`
// on. XLA guarantees this for aliased operands of a custom call, but one of its passes was seen to
// break it.
inline ffi::Error check_aliases(ffi::RemainingArgs args, size_t first_arg, ffi::RemainingRets rets,
                                size_t first_ret) {
  for (size_t r = first_ret; r < rets.size(); ++r) {
    const size_t a = first_arg + r - first_ret;
    const auto operand = args.get<ffi::AnyBuffer>(a);
    auto result = rets.get<ffi::AnyBuffer>(r);
    if (!operand.has_value()) return operand.error();
    if (!result.has_value()) return result.error();
    if (operand->untyped_data() != (*result)->untyped_data() && operand->size_bytes() != 0) {
      return not_aliased(a, r);
    }
  }
  return ffi::Error::Success();
}

}  // namespace jaxkv
