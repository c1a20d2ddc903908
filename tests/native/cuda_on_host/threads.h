// CUDA threads of a block as coroutines of one thread of the host, for kernels that are included as
// C++ sources.
//
// A coroutine runs until it waits for others, so a kernel without a required barrier is not certain
// to fail. The order in which they run is chosen by the caller: opposite orders expose most.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define __host__
#define __device__
#define __global__ [[maybe_unused]] static
#define __noinline__
#define __shared__
#define __launch_bounds__(threads)
#define __grid_constant__

struct Index {
  uint32_t x = 0;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

namespace simulated {

constexpr size_t kStackBytes = 32 * 1024;

struct Barrier {
  uint32_t arrived = 0, generation = 0;
};

struct Block {
  std::vector<ucontext_t> contexts;
  std::vector<std::vector<char>> stacks;
  std::vector<bool> finished;
  ucontext_t scheduler;
  uint32_t current = 0;
  Barrier all;
  std::vector<Barrier> warps;
  std::vector<uint32_t> values;  // of collectives, by thread
  int any = 0, result = 0;
  const std::function<void()>* run = nullptr;
};
inline Block block;

inline void yield() { swapcontext(&block.contexts[block.current], &block.scheduler); }

inline void arrive(Barrier& barrier, uint32_t expected) {
  const uint32_t generation = barrier.generation;
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
  while (barrier.generation == generation) yield();
}
inline void arrive_in_warp() { arrive(block.warps[threadIdx.x / 32], 32); }

// `use` receives the values of the warp's lanes.
template <typename Use>
uint32_t exchange(uint32_t value, Use use) {
  const uint32_t first = threadIdx.x / 32 * 32;
  block.values[threadIdx.x] = value;
  arrive_in_warp();
  const uint32_t result = use(&block.values[first]);
  arrive_in_warp();
  return result;
}

inline void enter() {
  (*block.run)();
  block.finished[block.current] = true;
  swapcontext(&block.contexts[block.current], &block.scheduler);
}

// Runs a block of `threads` threads; `descending` is the order in which they run.
inline void run_block(uint32_t threads, bool descending, const std::function<void()>& run) {
  block.contexts.assign(threads, {});
  block.stacks.resize(threads);
  block.finished.assign(threads, false);
  block.warps.assign(threads / 32, {});
  block.values.assign(threads, 0);
  block.all = {};
  block.run = &run;
  blockDim.x = threads;
  for (uint32_t t = 0; t < threads; ++t) {
    block.stacks[t].resize(kStackBytes);
    getcontext(&block.contexts[t]);
    block.contexts[t].uc_stack.ss_sp = block.stacks[t].data();
    block.contexts[t].uc_stack.ss_size = kStackBytes;
    makecontext(&block.contexts[t], enter, 0);
  }
  for (bool running = true; running;) {
    running = false;
    for (uint32_t i = 0; i < threads; ++i) {
      const uint32_t t = descending ? threads - 1 - i : i;
      if (block.finished[t]) continue;
      running = true;
      block.current = threadIdx.x = t;
      swapcontext(&block.scheduler, &block.contexts[t]);
    }
  }
}

}  // namespace simulated

inline void __syncthreads() { simulated::arrive(simulated::block.all, blockDim.x); }
inline int __syncthreads_or(int value) {
  auto& block = simulated::block;
  block.any |= value;
  __syncthreads();
  block.result = block.any;
  __syncthreads();
  block.any = 0;
  const int result = block.result;
  __syncthreads();
  return result;
}

inline uint32_t __ballot_sync(uint32_t, bool flag) {
  return simulated::exchange(flag, [](const uint32_t* lanes) {
    uint32_t mask = 0;
    for (int lane = 0; lane < 32; ++lane) mask |= lanes[lane] << lane;
    return mask;
  });
}
inline uint32_t __match_any_sync(uint32_t, uint32_t value) {
  return simulated::exchange(value, [value](const uint32_t* lanes) {
    uint32_t mask = 0;
    for (int lane = 0; lane < 32; ++lane) mask |= uint32_t{lanes[lane] == value} << lane;
    return mask;
  });
}
inline uint32_t __reduce_add_sync(uint32_t, uint32_t value) {
  return simulated::exchange(value, [](const uint32_t* lanes) {
    uint32_t sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += lanes[lane];
    return sum;
  });
}
inline uint32_t __reduce_max_sync(uint32_t, uint32_t value) {
  return simulated::exchange(
      value, [](const uint32_t* lanes) { return *std::max_element(lanes, lanes + 32); });
}
inline uint32_t __shfl_sync(uint32_t, uint32_t value, int lane) {
  return simulated::exchange(value, [lane](const uint32_t* lanes) { return lanes[lane]; });
}
inline uint32_t __shfl_up_sync(uint32_t, uint32_t value, uint32_t step) {
  const uint32_t lane = threadIdx.x % 32;
  return simulated::exchange(value, [lane, step](const uint32_t* lanes) {
    return lanes[lane >= step ? lane - step : lane];
  });
}
inline uint32_t __shfl_down_sync(uint32_t, uint32_t value, uint32_t step) {
  return simulated::exchange(value, [step](const uint32_t* lanes) {
    const uint32_t lane = threadIdx.x % 32;
    return lanes[lane + step < 32 ? lane + step : lane];
  });
}

inline uint32_t atomicAdd(uint32_t* at, uint32_t value) {
  const uint32_t old = *at;
  *at += value;
  return old;
}
inline uint32_t atomicCAS(uint32_t* at, uint32_t expected, uint32_t desired) {
  const uint32_t old = *at;
  if (old == expected) *at = desired;
  return old;
}
inline uint32_t atomicOr(uint32_t* at, uint32_t value) {
  const uint32_t old = *at;
  *at |= value;
  return old;
}
inline uint32_t atomicMin(uint32_t* at, uint32_t value) {
  const uint32_t old = *at;
  *at = std::min(old, value);
  return old;
}
inline int __popc(uint32_t value) { return __builtin_popcount(value); }
template <typename T>
T __ldg(const T* from) {
  return *from;
}
template <typename T>
T __ldcs(const T* from) {
  return *from;
}
using std::max;
using std::min;
