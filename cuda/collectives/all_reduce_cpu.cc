// The CPU backend of the all-reduce. A rank is the thread in which XLA runs a device; it blocks
// until its peers have arrived.
#include <atomic>
#include <bit>
#include <chrono>
#include <cstring>
#include <thread>

// GCC cannot see that every word that is used was received. Initializing all of them would cost the
// CUDA kernel registers.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include "collectives/all_reduce.h"

namespace jaxkv::collectives {

namespace {

namespace ffi = xla::ffi;

struct CpuMachine {
  static constexpr uint32_t kPollsPerCheck = 16;  // a pause can last for a time slice
  static uint64_t block() { return 0; }
  static uint64_t num_blocks() { return 1; }
  static int thread() { return 0; }
  static int num_threads() { return 1; }
  static void sync() {}
  static void publish() {}
  static bool all(bool mine) { return mine; }
  static uint32_t enter(uint32_t*) { return 0; }
  static Word* keep(Word* address) { return address; }
  static void pause() { std::this_thread::yield(); }
  static uint64_t nanoseconds() {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  static Word load(const void* from) {
    Word word;
    std::memcpy(&word, from, sizeof word);
    return word;
  }
  static void store(void* to, Word word) { std::memcpy(to, &word, sizeof word); }
  static void prefetch(const void*) {}
  static Word load_received(const Word* from) { return *from; }

  static void send(Word* to, Word word) {
    for (int k = 0; k < 4; ++k) {
      std::atomic_ref(to->part[k]).store(word.part[k], std::memory_order_release);
    }
  }
  static Word receive(Word* from) {
    Word word;
    for (int k = 0; k < 4; ++k) {
      word.part[k] = std::atomic_ref(from->part[k]).load(std::memory_order_acquire);
    }
    return word;
  }

  // Emulates the switch, but adds in rank order.
  template <class Element>
  static Word load_multicast_sum(const RankView& v, uint64_t i) {
    const auto words = reinterpret_cast<Word* const*>(v.multicast_staged.address);
    float lanes[Element::kLanes];
    for (int k = 0; k < Element::kLanes; ++k) {
      lanes[k] = Element::lane(words[0][i], k);
      for (int r = 1; r < v.geometry.world_size; ++r) lanes[k] += Element::lane(words[r][i], k);
    }
    return Element::word(lanes);
  }
  static void store_multicast(const RankView& v, uint64_t i, const Word& word) {
    const auto words = reinterpret_cast<Word* const*>(v.multicast_staged.address);
    for (int r = 0; r < v.geometry.world_size; ++r) words[r][i] = word;
  }
  static void alias() {}

  template <class T>
  static void store_release(T* to, T value) {
    std::atomic_ref(*to).store(value, std::memory_order_release);
  }
  static uint64_t load_acquire(const uint64_t* from) {
    return std::atomic_ref(*const_cast<uint64_t*>(from)).load(std::memory_order_acquire);
  }
  template <class T>
  static T peek(const T* from) {
    return std::atomic_ref(*const_cast<T*>(from)).load(std::memory_order_relaxed);
  }
  static void post(uint64_t* to, uint64_t value) {
    std::atomic_ref(*to).store(value, std::memory_order_relaxed);
  }
  static bool try_claim(uint32_t* word) { return std::atomic_ref(*word).exchange(1) == 0; }
};

struct Float32 {
  using Bits = uint32_t;
  static constexpr int kLanes = 4;
  static constexpr uint32_t kSubstituteNan = 0x7FC00000;
  static float lane(const Word& w, int k) { return std::bit_cast<float>(w.part[k]); }
  static Word word(const float* lanes) { return CpuMachine::load(lanes); }
};

template <class Half>
struct TwoByte {
  using Bits = uint16_t;
  static constexpr int kLanes = 8;
  static constexpr uint32_t kSubstituteNan = 0x7FFF7FFF;
  static float lane(const Word& w, int k) {
    return Half::widen(static_cast<uint16_t>(w.part[k / 2] >> (16 * (k % 2))));
  }
  static Word word(const float* lanes) {
    Word w{};
    for (int k = 0; k < kLanes; ++k) {
      w.part[k / 2] |= uint32_t{Half::narrow(lanes[k])} << (16 * (k % 2));
    }
    return w;
  }
};

struct Bfloat16 : TwoByte<Bfloat16> {
  static float widen(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }
  static uint16_t narrow(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    if (value != value) return 0x7FFF;
    return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);  // to nearest, even
  }
};

struct Float16 : TwoByte<Float16> {
  static float widen(uint16_t bits) { return static_cast<float>(std::bit_cast<_Float16>(bits)); }
  static uint16_t narrow(float value) {
    return value != value ? 0x7FFF : std::bit_cast<uint16_t>(static_cast<_Float16>(value));
  }
};

template <class Element>
bool run(const Task& task) {
  const CpuMachine machine;
  const RankView& view = task.rank->view;
  return with_world_size(view.geometry.world_size, [&]<int N>() {
    Call<CpuMachine, Element, N> call(machine, view, task.message);
    return with_route(route_of(task.message, view.geometry),
                      [&]<Route kRoute>() { return call.template run<kRoute>(); });
  });
}

ffi::Error all_reduce(int32_t device, ffi::AnyBuffer in, ffi::AnyBuffer,
                      ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer>,
                      int64_t communicator, int64_t algorithm, int64_t signature) {
  const auto task = resolve_task(device, in, out, communicator, algorithm, signature);
  if (!task.has_value()) return task.error();
  std::lock_guard lock(task->rank->calling);
  const bool done = task->message.dtype == ffi::F32    ? run<Float32>(*task)
                    : task->message.dtype == ffi::BF16 ? run<Bfloat16>(*task)
                                                       : run<Float16>(*task);
  return done ? ffi::Error::Success() : usable_communicator(communicator).error();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(AllReduceCpu, all_reduce,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("communicator")
                                  .Attr<int64_t>("algorithm")
                                  .Attr<int64_t>("signature"));

}  // namespace jaxkv::collectives
