// Memory of several GPUs of one process that their NVLink switch reads and writes at once.
//
// This has never run on hardware: where GPUs are shared between machines, a multicast object can
// take them out of service for all. So nothing of the driver's multicast is called, or asked
// about, unless a user has set JAXKV_MULTICAST=1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

namespace jaxkv::collectives {

// The same words of all ranks, as the switch addresses them. Not a pointer, as a plain load or
// store there is undefined: see `load_sum` and `store_all` of a `Machine`. (On the CPU backend the
// address of an array of pointers to the ranks' words.)
struct MulticastWords {
  uintptr_t address;
};
static_assert(!std::is_convertible_v<MulticastWords, const void*>);

// Takes back what was done, the last first.
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
  // At least so many bytes on each device. Throws std::runtime_error that names the call of the
  // driver and the device; nothing is left then.
  MulticastMemory(const std::vector<int32_t>& devices, size_t bytes);

  void* of_device(size_t i) const { return own_.at(i); }  // as that device addresses its own
  MulticastWords of_all(size_t i) const { return all_.at(i); }

 private:
  Undo undo_;
  std::vector<void*> own_;
  std::vector<MulticastWords> all_;
};

// Whether the driver says that a device has multicast; asks for that attribute alone. Throws as
// above.
bool multicast_supported(int32_t device);

}  // namespace jaxkv::collectives
