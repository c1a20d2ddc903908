// Memory of the id check on the host (cuda/transfer/block_copy.cc), in calls with many blocks or
// ids: what it takes at most, and what the thread keeps. Prints a line for each failure.
#include <malloc.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <numeric>

#include "transfer/block_copy.h"

namespace {

size_t live = 0, peak = 0;

}  // namespace

void* operator new(size_t bytes) {
  void* memory = std::malloc(bytes);
  if (!memory) throw std::bad_alloc();
  live += malloc_usable_size(memory);
  peak = std::max(peak, live);
  return memory;
}
void operator delete(void* memory) noexcept {
  live -= malloc_usable_size(memory);
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept { operator delete(memory); }

namespace {

using namespace jaxkv::transfer;

constexpr size_t kKept = 17 << 20;  // of a thread

struct Result {
  size_t num_pairs, num_entries, taken;
  uint64_t num_rejected;
};

size_t of_arguments = 0;  // live bytes that are not those of the check

Result select(const std::vector<int32_t>& sources, const std::vector<int32_t>& destinations,
              int32_t num_blocks) {
  const size_t before = live;
  peak = live;
  Result result{};
  {
    RejectedIds rejected;
    const IdLists ids{{sources, 0, sources.size()},
                      {destinations, 0, destinations.size()},
                      num_blocks,
                      num_blocks,
                      jaxkv::Operation::kSwapBlocks,
                      {}};
    const auto selected = select_pairs(ids, &rejected);
    result = {selected.pairs.size(), rejected.first.size(), 0, rejected.count};
  }
  result.taken = peak - before;
  return result;
}

int wrong(const char* name, const Result& got, size_t num_pairs, uint64_t num_rejected,
          size_t most) {
  const bool right = got.num_pairs == num_pairs && got.num_rejected == num_rejected &&
                     got.num_entries == std::min<uint64_t>(num_rejected, 64) && got.taken <= most &&
                     live - of_arguments <= kKept;
  if (!right) {
    std::printf("%s: %zu pairs, %zu of %llu rejected, %zu bytes taken, %zu kept\n", name,
                got.num_pairs, got.num_entries, static_cast<unsigned long long>(got.num_rejected),
                got.taken, live - of_arguments);
  }
  return !right;
}

}  // namespace

int main() {
  constexpr int32_t kBlocks = 1'000'000'000;
  constexpr size_t kIds = 1'000'000;
  constexpr size_t kPairs = kIds * sizeof(BlockPair), kSorted = kIds * sizeof(int32_t);
  std::vector<int32_t> good(kIds);
  std::iota(good.begin(), good.end(), 0);
  const std::vector<int32_t> bad(kIds, kBlocks), equal(kIds, 5);
  const std::vector<int32_t> few{7, 8, 9, 1}, far{kBlocks - 1, 3, 4, -1};
  const std::vector<int32_t> twice{kBlocks - 1, 3, kBlocks - 1, kBlocks};
  of_arguments = live;
  int failures = wrong("few ids", select(few, far, kBlocks), 3, 0, kKept);
  failures += wrong("few ids twice", select(few, twice, kBlocks), 1, 3, kKept);
  failures += wrong("few ids of few blocks", select(few, few, 1 << 24), 4, 0, kKept);
  failures += wrong("many ids", select(good, good, kBlocks), kIds, 0, kPairs + kSorted + kKept);
  failures += wrong("many bad ids", select(bad, good, kBlocks), 0, kIds, kPairs + kKept);
  failures += wrong("equal ids", select(good, equal, kBlocks), 0, kIds, kPairs + kSorted + kKept);
  return failures ? 1 : 0;
}
