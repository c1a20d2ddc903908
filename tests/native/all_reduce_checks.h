// Checks of all-reduces with all ranks in one process, for any `Backend`:
//
//   Backend(Geometry, timeout_ns, max_blocks)  its communicator; at most max_blocks blocks per call
//   communicator()
//   run(calls, arenas, calls_of, delays)       calls_of[rank] of the calls by each rank, in order
//
// Prints a line of JSON for each check, world size and algorithm.
#pragma once

#include <cstdio>
#include <map>
#include <random>
#include <string>

#include "all_reduce_cases.h"

namespace jaxkv::collectives::cases {

// Small, so that messages of few kilobytes exceed every threshold.
inline Geometry small_geometry(int world_size, bool multicast) {
  return {world_size, 2048, 2048, 64, multicast ? 512u : 0u};
}
// Of SymmetricMemory by default.
inline Geometry product_geometry(int world_size) {
  const uint64_t buffer = (8 << 20) / sizeof(Word) / world_size / 16 * 16;
  const uint64_t tile = (32 << 10) / world_size / 128 * 8 + ((32 << 10) / world_size % 128 ? 8 : 0);
  return {world_size, buffer, buffer, tile, 0};
}

struct Settings {
  uint64_t timeout_ns;        // of waits that end
  uint64_t short_timeout_ns;  // of waits for absent ranks
  bool brief;                 // one of four sizes, and the last rank is absent
  std::vector<Algorithm> algorithms;
  std::vector<int> max_blocks{kMaxBlocks, 3};  // in the check of thresholds
};

constexpr Dtype kDtypes[] = {Dtype::F32, Dtype::BF16, Dtype::F16};
constexpr size_t kCallsPerRun = 48;

template <class Backend>
class Checks {
 public:
  Checks(int world_size, const Settings& settings) : n_(world_size), settings_(settings) {}

  // Both sides of all thresholds, with as many blocks as fit, and with three.
  void thresholds() {
    for (const int max_blocks : settings_.max_blocks) {
      Backend ranks(small(), settings_.timeout_ns, max_blocks);
      std::vector<Case> calls;
      for (const Algorithm algorithm : settings_.algorithms) {
        for (const Dtype dtype : kDtypes) {
          const auto all = sizes(algorithm, dtype, small(), ranks.communicator()->block_limits());
          for (size_t i = 0; i < all.size(); i += settings_.brief ? 4 : 1) {
            const uint64_t offset = i % 4 == 3;
            calls.push_back({algorithm, dtype, all[i], static_cast<Values>(i % 3), offset,
                             offset * (i % 2), random_()});
          }
        }
      }
      verify("thresholds", ranks, calls);
    }
  }

  // The largest message without tiles and the smallest with tiles, in memory as users have it.
  void product_sizes() {
    const Geometry geometry = product_geometry(n_);
    Backend ranks(geometry, settings_.timeout_ns, kMaxBlocks);
    std::vector<Case> calls;
    const uint64_t parts = geometry.part_words() * n_;
    for (const uint64_t words : {parts, parts + 1, 3 * parts / 2}) {
      calls.push_back({Algorithm::kTwoShot, Dtype::BF16, words * 8, Values::kRounded});
    }
    calls.push_back({Algorithm::kLowLatency, Dtype::BF16, geometry.ll_words * 8});
    calls.push_back({Algorithm::kOneShot, Dtype::BF16, geometry.slot_words * 8});
    verify("sizes of SymmetricMemory", ranks, calls);
  }

  // Algorithms, sizes and dtypes in random order, and random delays of the ranks.
  void random_orders(int number) {
    Backend ranks(small(), settings_.timeout_ns, 5);
    std::vector<Case> calls;
    for (int i = 0; i < number; ++i) calls.push_back(random_case(ranks));
    verify("random orders", ranks, calls);
  }

  // Counters of barriers, of LL epochs and of calls that wrap.
  void wraps() {
    for (const uint64_t wrap : {uint64_t{1} << 31, uint64_t{1} << 32, uint64_t{0}}) {
      Backend ranks(small(), settings_.timeout_ns, 5);
      Header header{};
      header.progress.epoch = header.progress.ll_epochs = wrap - 5;
      header.progress.calls = kCallNumbers - 5;
      for (auto& of_block : header.signals.flags) {
        for (uint64_t& flag : of_block) flag = header.progress.epoch;
      }
      ranks.communicator()->initialize(header, kUnset);
      std::vector<Case> calls;
      for (int i = 0; i < 24; ++i) calls.push_back(random_case(ranks));
      verify("wraps", ranks, calls);
    }
  }

  // One rank makes no call, or none after some that are right. All others must name it, and return
  // NaN.
  void absent() {
    for (const int before : {0, 2}) {
      for (const Algorithm algorithm : settings_.algorithms) {
        for (const uint64_t count : {1, 29, n_ * 4096 + 40}) {
          for (const int rank : {0, 1, n_ - 1}) {
            if (settings_.brief && (rank != n_ - 1 || count == 29)) continue;
            one_absent(rank, before, {algorithm, Dtype::F32, std::min(count, most(algorithm))});
          }
        }
      }
    }
  }

  // Prints the counts; whether all were right.
  bool report() const {
    bool right = true;
    for (const auto& [key, count] : counts_) {
      std::printf(
          "{\"check\": \"%s\", \"ranks\": %d, \"algorithm\": \"%s\", \"calls\": %ld, "
          "\"wrong\": %ld}\n",
          key.first.c_str(), n_, key.second.c_str(), count.calls, count.wrong);
      right &= count.wrong == 0 && count.calls > 0;
    }
    std::fflush(stdout);
    return right;
  }

  // Runs the calls on all ranks and compares the results.
  void verify(const std::string& check, Backend& ranks, std::span<const Case> calls) {
    while (!calls.empty()) {
      const auto some = calls.first(std::min(calls.size(), kCallsPerRun));
      auto arenas = arenas_of(some, n_);
      ranks.run(some, arenas, std::vector<size_t>(n_, some.size()), delays_);
      compare(check, ranks, some, arenas);
      calls = calls.subspan(some.size());
    }
  }

  void compare(const std::string& check, Backend& ranks, std::span<const Case> calls,
               const std::vector<Arena>& arenas) {
    for (size_t k = 0; k < calls.size(); ++k) {
      const uint64_t wrong = wrong_sums(calls[k], k, arenas);
      count(check, ranks, calls[k], wrong);
      if (wrong) {
        std::fprintf(stderr, "%s: %d ranks, %s of %lu values of dtype %d: %lu wrong\n",
                     check.c_str(), n_, name(ranks, calls[k]).c_str(), calls[k].count,
                     static_cast<int>(calls[k].dtype), wrong);
      }
    }
    if (const auto fault = ranks.communicator()->fault()) {
      std::fprintf(stderr, "%s: %s\n", check.c_str(), describe(*fault).c_str());
    }
  }

  Case random_case(Backend& ranks) {
    const Algorithm algorithm = settings_.algorithms[random_() % settings_.algorithms.size()];
    const Dtype dtype = kDtypes[random_() % 3];
    const auto all = sizes(algorithm, dtype, small(), ranks.communicator()->block_limits());
    const uint64_t offset = random_() % 4 == 0;
    return {algorithm,
            dtype,
            1 + random_() % all[random_() % all.size()],
            static_cast<Values>(random_() % 3),
            offset,
            offset,
            random_()};
  }

 private:
  struct Count {
    int64_t calls = 0, wrong = 0;
  };

  Geometry small() const {
    const bool multicast = std::ranges::count(settings_.algorithms, Algorithm::kMultimem);
    return small_geometry(n_, multicast);
  }
  uint64_t most(Algorithm algorithm) const {
    const bool any = algorithm == Algorithm::kTwoShot || algorithm == Algorithm::kMultimem;
    return any ? std::numeric_limits<uint64_t>::max() : 2048 * 4;
  }

  static std::string name(Backend& ranks, const Case& c) {
    const Message message = message_of(c, nullptr, nullptr, 1);
    switch (route_of(message, ranks.communicator()->geometry())) {
      case Route::kLowLatency:
        return "low_latency";
      case Route::kOneShot:
        return "one_shot";
      case Route::kTwoShot:
        return "two_shot";
      case Route::kMultimem:
        return "multimem";
      default:
        return "two_shot in tiles";
    }
  }

  void count(const std::string& check, Backend& ranks, const Case& c, int64_t wrong) {
    Count& sum = counts_[{check, name(ranks, c)}];
    ++sum.calls;
    sum.wrong += wrong;
  }

  void one_absent(int absent, int before, const Case& c) {
    Backend ranks(small(), settings_.short_timeout_ns, kMaxBlocks);
    const std::vector<Case> calls(before + 1, c);
    auto arenas = arenas_of(calls, n_);
    std::vector<size_t> calls_of(n_, calls.size());
    calls_of[absent] = before;
    ranks.run(calls, arenas, calls_of, false);
    int64_t wrong = 0;
    for (int k = 0; k < before; ++k) wrong += wrong_sums(c, k, arenas);
    ranks.communicator()->for_each_local([&](Communicator::Rank& rank) {
      const int r = rank.view.rank;
      if (r == absent) return;
      wrong += !rank.view.fault->recorded || rank.view.fault->peer != absent;
      for (uint64_t i = 0; i < c.count; ++i) {
        wrong += !is_nan(c.dtype, arenas[r].result(c, before, i));
      }
    });
    const auto fault = ranks.communicator()->fault();
    wrong += !fault || fault->peer != absent || fault->phase == Phase::kAborted;
    count(before ? "rank stops" : "rank absent", ranks, c, wrong);
    if (wrong) {
      std::fprintf(stderr, "rank %d of %d absent after %d calls, %s of %lu values: %s\n", absent,
                   n_, before, name(ranks, c).c_str(), c.count,
                   fault ? describe(*fault).c_str() : "no fault");
    }
  }

  int n_;
  Settings settings_;
  bool delays_ = true;
  std::mt19937_64 random_{7};
  std::map<std::pair<std::string, std::string>, Count> counts_;
};

}  // namespace jaxkv::collectives::cases
