// In place of cuda/common/ptx.cuh: asynchronous copies to shared memory, which happen when a thread
// waits for them, so that a missing wait is certain to be seen.
#pragma once

#include <cstring>
#include <vector>

namespace jaxkv::ptx {

struct AsyncCopy {
  uint32_t shared, bytes;
  const void* from;
};
inline std::byte* shared_memory;
inline std::vector<std::vector<AsyncCopy>> uncommitted, committed;  // by thread

inline void start_block(std::byte* shared, uint32_t threads) {
  shared_memory = shared;
  uncommitted.assign(threads, {});
  committed.assign(threads, {});
}

inline void finish(std::vector<AsyncCopy>& copies) {
  for (const AsyncCopy& copy : copies) {
    std::memcpy(shared_memory + copy.shared, copy.from, copy.bytes);
  }
  copies.clear();
}

inline void cp_async_16(uint32_t shared, const void* from) {
  uncommitted[threadIdx.x].push_back({shared, 16, from});
}
inline void cp_async_4(uint32_t shared, const void* from) {
  uncommitted[threadIdx.x].push_back({shared, 4, from});
}
inline void cp_async_commit() {
  auto &copies = uncommitted[threadIdx.x], &group = committed[threadIdx.x];
  group.insert(group.end(), copies.begin(), copies.end());
  copies.clear();
}
inline void launch_dependents() {}
inline void wait_for_preceding_kernel() {}

inline void cp_async_wait_groups() { finish(committed[threadIdx.x]); }
inline void cp_async_wait_all() {
  cp_async_wait_groups();
  finish(uncommitted[threadIdx.x]);
}

}  // namespace jaxkv::ptx

inline size_t __cvta_generic_to_shared(const void* address) {
  return static_cast<const std::byte*>(address) - jaxkv::ptx::shared_memory;
}
