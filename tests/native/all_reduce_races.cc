// The CPU backend's all-reduce without Python and XLA, for ThreadSanitizer, with test hooks. Ranks
// are threads with random delays; all algorithms alternate, sizes grow and shrink, epochs wrap.
// Also: calls of a rank that has timed out, which handlers reject but a CUDA graph may replay, and
// ranks that make different calls.
#include <cstdio>
#include <random>

#include "collectives/all_reduce.cc"
#include "collectives/all_reduce_cpu.cc"
#include "testing/communicator_state.h"

namespace jaxkv::collectives {
namespace {

constexpr int kCalls = 100;
constexpr uint64_t kEpoch = -150;  // wraps during the test

bool call_rank(const std::shared_ptr<Communicator>& communicator, int32_t device,
               Algorithm algorithm, const float* in, float* out, size_t count, uint64_t signature) {
  const Task task{.communicator = communicator,
                  .rank = communicator->on_device(device),
                  .message = {reinterpret_cast<const char*>(in), reinterpret_cast<char*>(out),
                              count * sizeof(float), algorithm, ffi::F32, signature}};
  return run<Float32>(task);
}

bool run_ranks(int32_t world_size) {
  std::vector<int32_t> devices(world_size);
  for (int32_t i = 0; i < world_size; ++i) devices[i] = i;
  const Geometry geometry{world_size, 64, 64, 24, 64};
  auto communicator = make_cpu_communicator(geometry, {devices}, 60'000'000'000);
  testing::set_epoch(*communicator, kEpoch, 0);
  testing::set_stall(*communicator, 100'000);
  std::atomic<int> wrong = 0;
  auto rank = [&](int32_t device) {
    std::mt19937 late(device);
    for (int call = 0; call < kCalls; ++call) {
      if (late() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(late() % 300));
      const auto algorithm = static_cast<Algorithm>(call / 4 % 4);  // repeated, then changed
      const bool chunked = algorithm == Algorithm::kTwoShot || algorithm == Algorithm::kMultimem;
      const size_t limit = chunked ? 6000 : 256;
      const size_t count = 1 + call * 7919 % limit, offset = call / 7 % 4;  // also unaligned
      std::vector<float> in(offset + count), out(offset + count);
      for (size_t i = 0; i < count; ++i) in[offset + i] = static_cast<float>(i + call * device);
      bool right =
          call_rank(communicator, device, algorithm, &in[offset], &out[offset], count, call + 1);
      for (size_t i = 0; i < count; ++i) {
        right &= out[offset + i] ==
                 static_cast<float>(i * world_size + call * world_size * (world_size - 1) / 2);
      }
      wrong += !right;
    }
  };
  std::vector<std::thread> threads;
  for (const int32_t device : devices) threads.emplace_back(rank, device);
  for (auto& thread : threads) thread.join();
  std::printf("%d ranks: %d of %d calls wrong\n", world_size, wrong.load(), kCalls * world_size);
  return wrong == 0;
}

// A rank times out, and its stream continues with the next call. Its peer arrives late at the first
// call, and must never take words of the next call for those of the first.
bool late_peer(Algorithm algorithm) {
  constexpr size_t kCount = 64;
  const Geometry geometry{2, 64, 64, 24, 0};
  auto communicator = make_cpu_communicator(geometry, {{0, 1}}, 20'000'000);
  auto call = [&](int32_t device, float value, std::vector<float>& out) {
    const std::vector<float> in(kCount, value);
    return call_rank(communicator, device, algorithm, in.data(), out.data(), kCount, 1);
  };
  std::vector<float> out(kCount);
  const bool alone = call(0, 1, out) || call(0, 10, out);
  const bool complete = call(1, 100, out);
  bool right = !alone;
  for (const float value : out) right &= complete ? value == 101 : value != value;
  std::printf("a late peer %s, %s\n", complete ? "has its sum" : "times out",
              right ? "right" : "wrong");
  return right;
}

// All ranks make some calls together; then the last rank makes a different call with the same
// number of bytes. No rank may return a sum, and each must detect the mismatch.
bool other_call(int32_t world_size, Algorithm algorithm, size_t count) {
  constexpr int kTogether = 3;
  std::vector<int32_t> devices(world_size);
  for (int32_t i = 0; i < world_size; ++i) devices[i] = i;
  const Geometry geometry{world_size, 64, 64, 24, 64};
  auto communicator = make_cpu_communicator(geometry, {devices}, 60'000'000'000);
  testing::set_stall(*communicator, 100'000);
  std::atomic<int> wrong = 0, different = 0;
  auto rank = [&](int32_t device) {
    const std::vector<float> in(count, 1);
    for (int call = 0; call <= kTogether; ++call) {
      std::vector<float> out(count);
      const bool last = call == kTogether;
      const uint64_t signature = 1 + call + (last && device == world_size - 1);
      const bool complete =
          call_rank(communicator, device, algorithm, in.data(), out.data(), count, signature);
      wrong += complete == last;
      for (const float value : out) wrong += last ? value == value : value != world_size;
    }
    different += communicator->on_device(device)->view.fault->phase == Phase::kMismatch;
  };
  std::vector<std::thread> threads;
  for (const int32_t device : devices) threads.emplace_back(rank, device);
  for (auto& thread : threads) thread.join();
  std::printf("%d ranks, algorithm %d, %zu values: %d wrong, %d see other calls\n", world_size,
              static_cast<int>(algorithm), count, wrong.load(), different.load());
  return wrong == 0 && different == world_size;
}

}  // namespace
}  // namespace jaxkv::collectives

int main() {
  bool right = jaxkv::collectives::late_peer(jaxkv::collectives::Algorithm::kLowLatency);
  right &= jaxkv::collectives::late_peer(jaxkv::collectives::Algorithm::kTwoShot);
  for (const int32_t world_size : {2, 4, 6, 8}) {
    right &= jaxkv::collectives::run_ranks(world_size);
    for (int algorithm = 0; algorithm < 4; ++algorithm) {
      right &= jaxkv::collectives::other_call(
          world_size, static_cast<jaxkv::collectives::Algorithm>(algorithm), 256);
    }
    right &= jaxkv::collectives::other_call(world_size, jaxkv::collectives::Algorithm::kTwoShot,
                                            6000);  // in tiles
  }
  return right ? 0 : 1;
}
