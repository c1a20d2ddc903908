// Forks while threads free pinned memory and use its registry (cuda/cache/pinned_memory.cc), with
// pinning that does nothing, and unpinning that ends when the program permits it.
//
// Prints the wait status of the first child that fails, or 0.
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

#include "cache/pinned_memory.cc"

namespace {

using jaxkv::cache::PinnedMemory;

constexpr size_t kBytes = 4096;
std::atomic<bool> may_unpin{false}, ended{false};

std::shared_ptr<PinnedMemory> make(std::vector<int> devices) {
  return PinnedMemory::create(kBytes, -1, std::move(devices));
}

// The exit status: 0, or what went wrong.
int child(std::shared_ptr<PinnedMemory>& inherited) {
  alarm(10);  // the status of a child that waits for ever
  jaxkv::cache::wait_for_frees();
  void* const address = inherited->data();
  void* const here = mmap(address, kBytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  if (here != address) return 1;  // the pages are not inherited
  inherited.reset();
  unsigned char resident;
  if (mincore(here, kBytes, &resident) != 0) return 2;  // unmapped
  may_unpin = true;
  auto own = make({0});
  if (PinnedMemory::find(own->data()) != own) return 3;
  own.reset();
  jaxkv::cache::stop_freeing();
  return 0;
}

}  // namespace

namespace jaxkv::cache {

void pin(void*, size_t, int) {}

void unpin(void*, const std::vector<int>&) {
  while (!may_unpin) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace jaxkv::cache

int main() {
  make({0});  // freed until the end, by a thread
  std::thread waits(jaxkv::cache::wait_for_frees);
  std::thread uses([] {
    while (!ended) PinnedMemory::find(nullptr);
  });
  int failed = 0;
  for (int i = 0; i < 100 && failed == 0; ++i) {
    auto memory = make(i % 2 ? std::vector<int>{0} : std::vector<int>{});
    const pid_t pid = fork();
    if (pid == 0) _exit(child(memory));
    waitpid(pid, &failed, 0);
  }
  ended = true;
  may_unpin = true;
  uses.join();
  waits.join();
  jaxkv::cache::wait_for_frees();
  std::printf("%d\n", failed);
}
