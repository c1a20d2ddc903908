// Page-locked host memory on a NUMA node, owned by the arrays and views that use it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace jaxkv::cache {

// Offset of the data in a file: one huge page, so that the data can consist of huge pages. The
// first page of the file is a header; the pages between it and the data are never allocated.
constexpr size_t kFileOffset = size_t{2} << 20;

// Called in the thread that creates memory, with the number of its bytes that are populated. An
// exception ends the creation.
using Progress = std::function<void(size_t num_bytes)>;

// Host memory, page-locked for CUDA devices. It uses neither XLA's allocator of pinned memory,
// which rounds up to a power of two, ends at a limit set when the backend starts, and serves all
// devices from the NUMA node of the first, nor cudaHostAlloc, whose pages the kernel reports on no
// node.
class PinnedMemory {
 public:
  // Memory on `node` (-1: any), page-locked if there are CUDA devices that use it: zeroed, or with
  // fd >= 0 that of a file, from kFileOffset on; `allocated` if the file has its pages already.
  // Throws std::runtime_error.
  static std::shared_ptr<PinnedMemory> create(size_t num_bytes, int node, std::vector<int> devices,
                                              int fd = -1, bool allocated = false,
                                              const Progress& progress = nullptr);
  // The memory that begins at an address, or null.
  static std::shared_ptr<PinnedMemory> find(const void* address);

  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  // May run in any thread. Memory of devices is freed by a thread of its own, after their work:
  // work in flight may still use it, and the caller may be what that work waits for.
  ~PinnedMemory();

  // Arrays of JAX in this memory. Without any, the memory is only that of views: the pool is closed
  // or dropped, or XLA has copied it for a program that returned it without donation.
  std::atomic<int> num_arrays{0};

  void* data() const { return data_; }
  size_t num_bytes() const { return num_bytes_; }

 private:
  PinnedMemory(void* data, size_t num_bytes, std::vector<int> devices);

  void* data_;
  size_t num_bytes_;
  std::vector<int> devices_;
};

// Waits until all memory without an owner is free.
void wait_for_frees();
// Leaves all memory to the end of the process: its threads must not call CUDA from now on.
void stop_freeing();

// The NUMA node of each page of a sample, or a negative errno.
std::vector<int> nodes_of_pages(uintptr_t address, size_t num_bytes);

#ifdef JAXKV_CUDA
// Both throw std::runtime_error. `unpin` waits for the work of the devices first.
void pin(void* data, size_t num_bytes, int device);
void unpin(void* data, const std::vector<int>& devices);
#endif

}  // namespace jaxkv::cache
