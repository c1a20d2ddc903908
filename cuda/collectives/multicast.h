// Multicast memory (NVLS): memory of several GPUs of one process that the NVLink switch reads and
// writes at once.
//
// Has never run on hardware: where several machines share the GPUs of a host, a multicast object
// may take the GPUs out of service for all of them. So no multicast function or attribute of the
// driver is used unless the user has set JAXKV_MULTICAST=1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

namespace jaxkv::collectives {

// Multicast address of the same words of all ranks. Not a pointer, because a plain load or store
// there is undefined; see `load_multicast_sum` and `store_multicast` of a `Machine`. (On the CPU
// backend: the address of an array of pointers to the ranks' words.)
struct MulticastWords {
  uintptr_t address;
};
static_assert(!std::is_convertible_v<MulticastWords, const void*>);

// Cleanup steps, run in reverse order.
class Undo {
 public:
  Undo() = default;
  Undo(const Undo&) = delete;
  ~Undo() {
    for (; !steps_.empty(); steps_.pop_back()) steps_.back()();
  }
  void push(std::function<void()> step) { steps_.push_back(std::move(step)); }

 private:
  std::vector<std::function<void()>> steps_;
};

class MulticastMemory {
 public:
  // At least `bytes` on each device. Throws std::runtime_error that names the driver function and
  // the device, after releasing everything that was allocated.
  MulticastMemory(const std::vector<int32_t>& devices, size_t bytes);

  // Addresses on device i: local, and of all devices at once.
  void* local_address(size_t i) const { return own_.at(i); }
  MulticastWords multicast_address(size_t i) const { return all_.at(i); }

 private:
  Undo undo_;
  std::vector<void*> own_;
  std::vector<MulticastWords> all_;
};

// Whether the driver reports multicast support for a device; queries no other attribute. Throws as
// above.
bool multicast_supported(int32_t device);

}  // namespace jaxkv::collectives
