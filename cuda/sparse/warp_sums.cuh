// Sums over the warps of a thread block.
#pragma once

#include <cstdint>

namespace jaxkv::sparse {

inline constexpr uint32_t kLanes = 32;
inline constexpr uint32_t kAllLanes = ~0u;

// Two sets of counters alternate, so that a sum needs only one barrier: before a warp writes a set
// again, it has passed the barrier of the sum between, at which every warp arrives after reading
// that set.
class WarpSums {
 public:
  __device__ explicit WarpSums(uint32_t (*sums)[kLanes]) : sums_(sums) {}

  // `value` is that of the warp. Returns the sum of the preceding warps, and of all in `total`.
  __device__ uint32_t exclusive(uint32_t value, uint32_t* total) {
    const uint32_t of_lane = exchange(value);
    *total = __reduce_add_sync(kAllLanes, of_lane);
    const bool precedes = threadIdx.x % kLanes < threadIdx.x / kLanes;
    return __reduce_add_sync(kAllLanes, precedes ? of_lane : 0);
  }
  __device__ uint32_t total(uint32_t value) {
    return __reduce_add_sync(kAllLanes, exchange(value));
  }
  __device__ uint32_t maximum(uint32_t value) {
    return __reduce_max_sync(kAllLanes, exchange(value));
  }

 private:
  // Lane i gets the value of warp i, or 0.
  __device__ uint32_t exchange(uint32_t value) {
    const uint32_t warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    turn_ ^= 1;
    if (lane == 0) sums_[turn_][warp] = value;
    __syncthreads();
    return lane < blockDim.x / kLanes ? sums_[turn_][lane] : 0;
  }

  uint32_t (*sums_)[kLanes];
  uint32_t turn_ = 0;
};

}  // namespace jaxkv::sparse
