// Test hook: random delays of the threads of an all-reduce. Without JAXKV_TEST_HOOKS the kernels
// contain no such code.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace jaxkv::collectives {

#ifdef JAXKV_TEST_HOOKS

template <class Machine, class View>
JAXKV_NOINLINE void stall_at_random(const Machine& m, const View& v) {
  const uint64_t begin = m.nanoseconds();
  const uint64_t dice = (begin + 977 * v.rank + 31 * m.block()) * 0x9E3779B97F4A7C15;
  if (dice >> 62) return;
  while (m.nanoseconds() - begin < (dice >> 20) % v.stall_ns) m.pause();
}

template <class Machine, class View>
JAXKV_DEVICE void stall(const Machine& m, const View& v) {
  if (v.stall_ns) stall_at_random(m, v);
}

#else

template <class Machine, class View>
JAXKV_DEVICE void stall(const Machine&, const View&) {}

#endif

}  // namespace jaxkv::collectives
