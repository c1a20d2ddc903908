#include "cache/pinned_memory.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>

namespace jaxkv::cache {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kChunk = size_t{64} << 20;  // that one thread populates at a time
constexpr unsigned kMaxThreads = 16;
constexpr size_t kMaxSample = 4096;  // pages whose node is read back

// MADV_POPULATE_READ and _WRITE, MPOL_PREFERRED: the headers may be older than the kernel.
constexpr int kPopulateRead = 22, kPopulateWrite = 23;
constexpr int kPolicyPreferred = 1;
constexpr size_t kMaxNodes = 1024;

struct Entry {
  std::weak_ptr<PinnedMemory> memory;
  const PinnedMemory* to_free;  // the same, or null if the memory is that of the parent process
};

struct Registry {
  std::mutex mutex;
  std::condition_variable freed;
  std::map<const void*, Entry> by_address;
  size_t freeing = 0;
  bool stopped = false;
};

Registry& registry();

// In the child of a fork. It has neither the threads that free memory or wait for that, nor the
// pages (MADV_DONTFORK), at whose addresses other memory may be mapped.
void forget_parent() {
  Registry& all = registry();
  new (&all.freed) std::condition_variable;  // the waiting threads would count for ever
  all.freeing = 0;
  for (auto& [address, entry] : all.by_address) entry.to_free = nullptr;
  all.mutex.unlock();
}

// Never destroyed: arrays may outlive static variables.
Registry& registry() {
  static auto* const instance = [] {
    pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                   forget_parent);
    return new Registry;
  }();
  return *instance;
}

size_t page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

std::runtime_error failure(size_t num_bytes, const std::string& reason) {
  return std::runtime_error("jaxkv: " + std::to_string(num_bytes) +
                            " bytes of pinned host memory: " + reason);
}

// Aligned to huge pages, of which one is populated and pinned faster than 512 small ones.
void* map(size_t num_bytes, int fd) {
  const size_t reserved = num_bytes + (num_bytes >= kHugePage ? kHugePage : 0);
  void* const begin =
      mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (begin == MAP_FAILED) {
    throw failure(num_bytes, std::string("mmap failed: ") + std::strerror(errno));
  }
  auto* data = static_cast<std::byte*>(begin);
  if (reserved > num_bytes) {
    const size_t head = -reinterpret_cast<uintptr_t>(begin) % kHugePage;
    if (head) munmap(data, head);
    data += head;
    const size_t tail = reserved - head - num_bytes;
    if (tail) munmap(data + num_bytes, tail);
  }
  if (fd >= 0 && mmap(data, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
                      kFileOffset) == MAP_FAILED) {
    const int error = errno;
    munmap(data, num_bytes);
    throw failure(num_bytes, std::string("mmap of a file failed: ") + std::strerror(error));
  }
  if (num_bytes >= kHugePage) madvise(data, num_bytes, MADV_HUGEPAGE);  // no effect if disabled
  return data;
}

// A preference: other nodes are used if `node` is full. Not permitted in some containers.
void prefer_node(void* data, size_t num_bytes, int node) {
  std::array<unsigned long, kMaxNodes / (8 * sizeof(unsigned long))> mask{};
  if (node < 0 || node >= static_cast<int>(kMaxNodes)) return;
  const size_t bits = 8 * sizeof(unsigned long);
  mask[node / bits] = 1UL << (node % bits);
  (void)syscall(SYS_mbind, data, num_bytes, kPolicyPreferred, mask.data(), kMaxNodes, 0);
}

// Returns 0 or an errno. The kernel maps allocated pages of a file, writable too, three times as
// fast by reads, of which one maps several pages.
int populate(std::byte* data, size_t num_bytes, bool allocated) {
  while (madvise(data, num_bytes, allocated ? kPopulateRead : kPopulateWrite) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EINVAL) return errno;
    // Linux before 5.14. An atomic operation: others may write the pages of a file meanwhile.
    for (size_t i = 0; i < num_bytes; i += page_bytes()) {
      __atomic_fetch_or(reinterpret_cast<unsigned char*>(data + i), 0, __ATOMIC_RELAXED);
    }
    return 0;
  }
  return 0;
}

// The kernel zeroes pages in the thread that touches them: one thread would take a second per few
// GiB.
int populate_with_threads(std::byte* data, size_t num_bytes, bool allocated,
                          const Progress& progress) {
  const size_t num_chunks = (num_bytes + kChunk - 1) / kChunk;
  std::atomic<size_t> next{0}, populated{0};
  std::atomic<int> error{0};
  auto work = [&](const Progress& report) {
    for (size_t i; !error.load() && (i = next.fetch_add(1)) < num_chunks;) {
      const size_t begin = i * kChunk, size = std::min(kChunk, num_bytes - begin);
      if (const int failed = populate(data + begin, size, allocated)) error.store(failed);
      populated += size;
      if (report) report(populated.load());
    }
  };
  const size_t num_threads = std::min<size_t>(
      {num_chunks, kMaxThreads, std::max(1U, std::thread::hardware_concurrency())});
  std::vector<std::thread> threads;
  threads.reserve(num_threads);
  try {
    for (size_t i = 1; i < num_threads; ++i) threads.emplace_back(work, nullptr);
  } catch (const std::exception&) {  // at a limit of threads or memory those started suffice
  }
  std::exception_ptr thrown;
  try {
    work(progress);
  } catch (...) {  // of `progress`
    thrown = std::current_exception();
    error.store(ECANCELED);
  }
  for (auto& thread : threads) thread.join();
  if (thrown) std::rethrow_exception(thrown);
  if (progress && !error.load()) progress(num_bytes);  // the other threads may have ended later
  return error.load();
}

// Memory that cannot be unpinned stays mapped: the device could still write it.
void free_pages(void* data, size_t num_bytes, [[maybe_unused]] const std::vector<int>& devices) {
#ifdef JAXKV_CUDA
  try {
    if (!devices.empty()) unpin(data, devices);
  } catch (const std::exception&) {
    return;
  }
#endif
  munmap(data, num_bytes);
}

}  // namespace

PinnedMemory::PinnedMemory(void* data, size_t num_bytes, std::vector<int> devices)
    : data_(data), num_bytes_(num_bytes), devices_(std::move(devices)) {}

std::shared_ptr<PinnedMemory> PinnedMemory::create(size_t num_bytes, int node,
                                                   std::vector<int> devices, int fd, bool allocated,
                                                   const Progress& progress) {
  const size_t rounded = (std::max<size_t>(num_bytes, 1) + page_bytes() - 1) & -page_bytes();
  auto unmap = [rounded](void* pages) { munmap(pages, rounded); };
  std::unique_ptr<void, decltype(unmap)> pages(map(rounded, fd), unmap);
  void* const data = pages.get();
  // A child process needs no copy of the pages, and must not make this one copy pages it writes.
  madvise(data, rounded, MADV_DONTFORK);
  prefer_node(data, rounded, node);
  std::string error;
  if (const int code =
          populate_with_threads(static_cast<std::byte*>(data), rounded, allocated, progress)) {
    // EFAULT: a write would raise SIGBUS.
    error = fd >= 0 && code == EFAULT ? "its file system is full" : std::strerror(code);
  } else if (!devices.empty()) {
#ifdef JAXKV_CUDA
    pin(data, rounded, devices.front());
#else
    error = "built without CUDA";
#endif
  }
  if (!error.empty()) throw failure(rounded, error);
  std::shared_ptr<PinnedMemory> memory(new PinnedMemory(data, rounded, std::move(devices)));
  (void)pages.release();
  std::lock_guard lock(registry().mutex);
  registry().by_address[data] = {memory, memory.get()};
  return memory;
}

std::shared_ptr<PinnedMemory> PinnedMemory::find(const void* address) {
  std::lock_guard lock(registry().mutex);
  const auto entry = registry().by_address.find(address);
  return entry == registry().by_address.end() ? nullptr : entry->second.memory.lock();
}

PinnedMemory::~PinnedMemory() {
  Registry& all = registry();
  {
    std::lock_guard lock(all.mutex);
    const auto entry = all.by_address.find(data_);
    if (all.stopped || entry == all.by_address.end() || entry->second.to_free != this) return;
    all.by_address.erase(entry);
    if (!devices_.empty()) ++all.freeing;
  }
  if (devices_.empty()) {
    free_pages(data_, num_bytes_, devices_);
    return;
  }
  auto free_and_count = [&all, data = data_, num_bytes = num_bytes_, devices = devices_] {
    free_pages(data, num_bytes, devices);
    std::lock_guard lock(all.mutex);
    --all.freeing;
    all.freed.notify_all();
  };
  try {
    std::thread(free_and_count).detach();
  } catch (const std::exception&) {  // no thread, or no memory for one
    free_and_count();
  }
}

void wait_for_frees() {
  std::unique_lock lock(registry().mutex);
  registry().freed.wait(lock, [] { return registry().freeing == 0; });
}

void stop_freeing() {
  {
    std::lock_guard lock(registry().mutex);
    registry().stopped = true;
  }
  wait_for_frees();
}

std::vector<int> nodes_of_pages(uintptr_t address, size_t num_bytes) {
  const size_t num_pages = std::max<size_t>(num_bytes / page_bytes(), 1);
  const size_t count = std::min(num_pages, kMaxSample);
  const uintptr_t first = address & -page_bytes();
  std::vector<void*> pages(count);
  for (size_t i = 0; i < count; ++i) {
    // The first and the last page, and the others between them at equal distances.
    const size_t page = count == 1 ? 0 : i * (num_pages - 1) / (count - 1);
    pages[i] = reinterpret_cast<void*>(first + page * page_bytes());
  }
  std::vector<int> nodes(count);
  if (syscall(SYS_move_pages, 0, count, pages.data(), nullptr, nodes.data(), 0) != 0) {
    throw std::runtime_error(std::string("jaxkv: move_pages failed: ") + std::strerror(errno));
  }
  return nodes;
}

}  // namespace jaxkv::cache
