// Recording of faults by kernels.
#pragma once

#include "common/device.h"
#include "common/error_ring.h"
#include "xla/ffi/api/ffi.h"

namespace jaxkv {

// Allocates the rings of a device for a scope and for the default scope, once; fails for ordinals
// from kMaxDevices on.
xla::ffi::Error prepare_rings(int32_t device, Scope scope = Scope::kDefault);

// The rings for kernels of a device; null before prepare_rings. Those of the default scope if the
// scope was registered after prepare_rings.
ErrorRings* device_rings(int32_t device, Scope scope);

inline __device__ void record_error(ErrorRings* rings, Fault fault, int32_t position, int32_t id,
                                    int32_t limit) {
  ErrorRing* ring = &rings->of(fault.code());
  const unsigned long long slot = atomicAdd(&ring->count, 1ull);
  auto* entry = &ring->entries[slot % ErrorRing::kEntries];
  *reinterpret_cast<int4*>(entry) = make_int4(fault.word, position, id, limit);
  __threadfence_system();
  *reinterpret_cast<volatile unsigned long long*>(&entry->sequence) = slot + 1;
  __threadfence_system();
  atomicAdd(&ring->written, 1ull);
}

}  // namespace jaxkv
