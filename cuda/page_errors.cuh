// How a kernel records a fault.
#pragma once

#include "page_errors.h"

namespace jaxkv {

inline __device__ void record_fault(PageErrorRing* ring, PageFault fault, int32_t position,
                                    int32_t id, int32_t limit) {
  const unsigned long long slot = atomicAdd(&ring->count, 1ull);
  auto* entry = &ring->entries[slot % PageErrorRing::kEntries];
  entry->fault = fault;
  entry->position = position;
  entry->id = id;
  entry->limit = limit;
  __threadfence_system();
  *reinterpret_cast<volatile unsigned long long*>(&entry->sequence) = slot + 1;
}

}  // namespace jaxkv
