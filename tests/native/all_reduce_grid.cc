// Thread blocks of all-reduces on GPUs of any size: every call fits on the device at once.
#include <cstdio>

#include "collectives/grid.h"

namespace {

using namespace jaxkv::collectives;

constexpr int kPerProcessor[kRoutes] = {4, 3, 4, 0, 1};  // 0: the kernel does not fit

int wrong_grids(int processors, int world_size) {
  BlockLimits limits;
  for (const int blocks : kPerProcessor) limits.push_back(resident_limit(blocks, processors));
  const Geometry geometry{world_size, 1 << 15, 1 << 16, 512, 1 << 16};
  int wrong = 0;
  for (int algorithm = 0; algorithm < 4; ++algorithm) {
    for (uint64_t bytes = 2; bytes < uint64_t{1} << 40; bytes = bytes * 3 / 2 + 1) {
      const Message message{nullptr, nullptr, bytes, static_cast<Algorithm>(algorithm), {}, 1};
      const auto route = static_cast<int>(route_of(message, geometry));
      const int blocks = blocks_for(message, geometry, limits);
      const int spared = std::max(processors - kSpareProcessors, 0) * kPerProcessor[route];
      const int most = route == static_cast<int>(Route::kTiled) ? kTileBlocks : kMaxBlocks;
      wrong += blocks < 1 || blocks > std::max(spared, 1) || blocks > most;
      // Small calls have one block, and large ones all that fit.
      wrong += bytes <= kThreads * sizeof(Word) && blocks != 1;
      wrong += bytes > uint64_t{1} << 30 && blocks != std::min(std::max(spared, 1), most);
    }
  }
  if (wrong) std::printf("%d SMs, %d ranks: %d wrong\n", processors, world_size, wrong);
  return wrong;
}

}  // namespace

int main() {
  int wrong = resident_limit(1 << 30, 1 << 30) != kMaxBlocks;
  for (const int processors : {1, 2, 3, 4, 5, 6, 16, 78, 108, 114, 132, 148, 10'000}) {
    for (const int world_size : {2, 4, 6, 8}) wrong += wrong_grids(processors, world_size);
  }
  return wrong ? 1 : 0;
}
