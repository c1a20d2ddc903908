// The checks of all_reduce_checks.h with the CPU backend: ranks are threads.
#include <algorithm>
#include <cstdlib>
#include <latch>

#include "all_reduce_checks.h"
#include "collectives/all_reduce.cc"
#include "collectives/all_reduce_cpu.cc"

namespace jaxkv::collectives::cases {
namespace {

constexpr uint64_t kTimeoutNs = 60'000'000'000;  // of waits that end

class CpuRanks {
 public:
  CpuRanks(const Geometry& geometry, uint64_t timeout_ns, int max_blocks)
      : timeout_ns_(timeout_ns) {
    std::vector<int32_t> devices(geometry.world_size);
    for (int32_t i = 0; i < geometry.world_size; ++i) devices[i] = i;
    communicator_ = make_cpu_communicator(geometry, {devices}, timeout_ns);
    communicator_->limit_blocks(BlockLimits(kRoutes, max_blocks));
  }

  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }

  void run(std::span<const Case> calls, std::vector<Arena>& arenas,
           const std::vector<size_t>& calls_of, bool delays) {
    // A short timeout could end calls that all ranks make, on a slow machine.
    const std::vector<size_t> none(arenas.size());
    const std::vector<size_t> common(arenas.size(), *std::ranges::min_element(calls_of));
    limit_waits(kTimeoutNs);
    run_between(calls, arenas, none, common, delays);
    limit_waits(timeout_ns_);
    run_between(calls, arenas, common, calls_of, delays);
  }

 private:
  void limit_waits(uint64_t timeout_ns) {
    communicator_->for_each_local([=](Communicator::Rank& rank) {
      rank.view.timeout_ns = rank.view.first_timeout_ns = timeout_ns;
    });
  }

  // Calls first[rank] to last[rank] - 1 of each rank.
  void run_between(std::span<const Case> calls, std::vector<Arena>& arenas,
                   const std::vector<size_t>& first, const std::vector<size_t>& last, bool delays) {
    std::latch together(std::ssize(arenas));
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < arenas.size(); ++rank) {
      threads.emplace_back([&, rank] {
        std::mt19937 late(rank);
        together.arrive_and_wait();
        for (size_t k = first[rank]; k < last[rank]; ++k) {
          if (delays && late() % 8 == 0) {
            std::this_thread::sleep_for(std::chrono::microseconds(late() % 200));
          }
          call(calls[k], arenas[rank], k, rank);
        }
      });
    }
    for (auto& thread : threads) thread.join();
  }

  void call(const Case& c, Arena& arena, size_t k, int32_t rank) {
    const auto [in, out] = arena.places[k];
    const Task task{communicator_, communicator_->on_device(rank),
                    message_of(c, &arena.bytes[in], &arena.bytes[out], k + 1)};
    if (c.dtype == Dtype::F32) {
      collectives::run<Float32>(task);
    } else if (c.dtype == Dtype::BF16) {
      collectives::run<Bfloat16>(task);
    } else {
      collectives::run<Float16>(task);
    }
  }

  uint64_t timeout_ns_;
  std::shared_ptr<Communicator> communicator_;
};

bool check(int world_size) {
  Checks<CpuRanks> checks(world_size, {kTimeoutNs,
                                       200'000'000,
                                       true,
                                       {Algorithm::kLowLatency, Algorithm::kOneShot,
                                        Algorithm::kTwoShot, Algorithm::kMultimem},
                                       {3}});
  checks.thresholds();
  checks.random_orders(24);
  checks.wraps();
  checks.absent();
  return checks.report();
}

}  // namespace
}  // namespace jaxkv::collectives::cases

int main() {
  bool right = true;
  for (const int world_size : {2, 6}) {
    right &= jaxkv::collectives::cases::check(world_size);
  }
  return right ? 0 : 1;
}
