// In place of cuda/common/error_ring.cuh: counts faults.
#pragma once

#include "common/error_ring.h"

namespace jaxkv {

inline int64_t faults = 0;

inline void record_error(ErrorRings*, Fault, int32_t, int32_t, int32_t) { ++faults; }

}  // namespace jaxkv
