// Which rank the CPU backend's all-reduce reports if one is absent. Ranks are threads; the absent
// one never calls, or was killed in a call that only some of its peers could complete.
#include <cstdio>
#include <latch>

#include "collectives/all_reduce.cc"
#include "collectives/all_reduce_cpu.cc"

namespace jaxkv::collectives {
namespace {

constexpr uint64_t kTimeoutNs = 40'000'000;
constexpr uint64_t kCall = 7;  // signature

struct Group {
  explicit Group(int32_t world_size) : ranks(world_size) {
    std::vector<int32_t> devices(world_size);
    for (int32_t i = 0; i < world_size; ++i) devices[i] = i;
    const Geometry geometry{world_size, 64, 64, 24, 64};
    communicator = make_cpu_communicator(geometry, {devices}, kTimeoutNs);
    communicator->for_each_local([&](auto& rank) { ranks[rank.view.rank] = &rank; });
  }

  // Until a call fails.
  void run_rank(int32_t rank, Algorithm algorithm, size_t count) {
    const std::vector<float> in(count, 1);
    std::vector<float> out(count);
    const Task task{
        .communicator = communicator,
        .rank = ranks[rank],
        .message = {reinterpret_cast<const char*>(in.data()), reinterpret_cast<char*>(out.data()),
                    count * sizeof(float), algorithm, ffi::F32, kCall}};
    while (run<Float32>(task)) {
    }
  }

  // What `from` sends to `to` in the first call, with low_latency.
  void deliver(int32_t from, int32_t to, size_t count) {
    const RankView& view = ranks[to]->view;
    Header& header = *view.headers[to];
    CpuMachine::post(&header.signals.calls[0][from], call_mark(kCall, 0));
    Word* buffer = receive_buffers_of(&header) + from * view.geometry.ll_words;
    for (size_t i = 0; i < count; i += 4) CpuMachine::send(buffer + i / 4, Word{});
  }

  // The number of ranks that name another rank than the absent one.
  int wrong(int32_t absent, Algorithm algorithm, size_t count) {
    std::latch together(std::ssize(ranks) - 1);
    std::vector<std::thread> threads;
    for (int32_t rank = 0; rank < std::ssize(ranks); ++rank) {
      if (rank == absent) continue;
      threads.emplace_back([=, this, &together] {
        together.arrive_and_wait();
        run_rank(rank, algorithm, count);
      });
    }
    for (auto& thread : threads) thread.join();
    int wrong = 0;
    for (int32_t rank = 0; rank < std::ssize(ranks); ++rank) {
      const PeerFault& fault = *ranks[rank]->view.fault;
      wrong += rank != absent && (!fault.recorded || fault.peer != absent);
    }
    const auto fault = communicator->fault();
    return wrong + (!fault || fault->phase == Phase::kAborted);
  }

  std::shared_ptr<Communicator> communicator;
  std::vector<Communicator::Rank*> ranks;
};

int never_calls(int32_t world_size) {
  int wrong = 0;
  for (const auto algorithm : {Algorithm::kTwoShot, Algorithm::kOneShot, Algorithm::kLowLatency}) {
    for (const size_t count : {1, 2, 5, 8, 29, 4001}) {
      if (count > 64 && algorithm != Algorithm::kTwoShot) continue;  // in tiles
      for (const int32_t absent : {0, 1, world_size - 1}) {
        const int more = Group(world_size).wrong(absent, algorithm, count);
        if (more) {
          std::printf("%d ranks without %d, algorithm %d, %zu values: %d wrong\n", world_size,
                      absent, static_cast<int>(algorithm), count, more);
        }
        wrong += more;
      }
    }
  }
  return wrong;
}

// Some ranks have all words of the killed one, complete the call and wait in the next one, also for
// those that do not have them.
int killed_in_call(int32_t world_size) {
  int wrong = 0;
  for (int32_t killed = 0; killed < world_size; ++killed) {
    for (const size_t count : {1, 29}) {
      Group group(world_size);
      for (int32_t to = 0; to < world_size; to += 2) {
        if (to != killed) group.deliver(killed, to, count);
      }
      const int more = group.wrong(killed, Algorithm::kLowLatency, count);
      if (more) std::printf("%d ranks, %d killed: %d wrong\n", world_size, killed, more);
      wrong += more;
    }
  }
  return wrong;
}

bool called(const std::shared_ptr<Communicator>& communicator, int32_t device) {
  const float in = 1;
  float out = 0;
  const Task task{.communicator = communicator,
                  .rank = communicator->on_device(device),
                  .message = {reinterpret_cast<const char*>(&in), reinterpret_cast<char*>(&out),
                              sizeof in, Algorithm::kTwoShot, ffi::F32, kCall}};
  return run<Float32>(task) && out == 2;
}

// Two ranks, as of two processes. In the first call one may be late by several timeouts.
int first_call_waits_longer() {
  constexpr uint64_t kSlowNs = 1'000'000'000;  // a slow machine is later by less than 8 of them
  const Geometry geometry{2, 64, 64, 24, 0};
  const auto first = make_cpu_communicator(geometry, {{0, -1}}, kSlowNs);
  const auto second = make_cpu_communicator(geometry, {{-1, 1}}, kSlowNs);
  const ByRank<Handle> handles{{first->handles()[0][0], second->handles()[0][1]}};
  first->map(handles);
  second->map(handles);
  bool right = true;
  std::thread late([&] {
    std::this_thread::sleep_for(std::chrono::nanoseconds(2 * kSlowNs));
    right &= called(second, 1);
  });
  const bool waited = called(first, 0);
  late.join();
  const uint64_t begin = CpuMachine::nanoseconds();
  const bool alone = called(first, 0);
  const bool in_time = CpuMachine::nanoseconds() - begin < kFirstCallTimeouts * kSlowNs;
  std::printf("first call %d %d, then alone %d, in time %d\n", right, waited, alone, in_time);
  return !(right && waited && !alone && in_time);
}

}  // namespace
}  // namespace jaxkv::collectives

int main() {
  int wrong = jaxkv::collectives::first_call_waits_longer();
  for (const int32_t world_size : {2, 4, 6, 8}) {
    wrong += jaxkv::collectives::never_calls(world_size);
    wrong += jaxkv::collectives::killed_in_call(world_size);
  }
  return wrong ? 1 : 0;
}
