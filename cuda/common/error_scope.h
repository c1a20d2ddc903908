// The scope of a call without the attribute `copy` or `codes`, which contain theirs.
#pragma once

#include "common/error_ring.h"
#include "xla/ffi/api/ffi.h"

namespace jaxkv {

// Only a call that is traced in a scope has the attribute: each adds host time to each call.
inline Scope scope_of_call(xla::ffi::Dictionary attributes) {
  if (!attributes.contains<int64_t>("scope")) return Scope::kDefault;
  return static_cast<Scope>(*attributes.get<int64_t>("scope"));
}

}  // namespace jaxkv
