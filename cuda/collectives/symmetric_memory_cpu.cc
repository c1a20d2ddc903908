// Symmetric memory of the CPU backend: shared memory of the host, mapped by all processes.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <unordered_map>

#include "collectives/symmetric_memory.h"

namespace jaxkv::collectives {

namespace {

// Memory that other processes can also map. It has no name that could outlive them: they open the
// file through this process's descriptor.
class SharedMemory {
 public:
  // New memory, zero-filled.
  explicit SharedMemory(size_t bytes) : bytes_(bytes), file_(memfd_create("jaxkv", MFD_CLOEXEC)) {
    if (file_ < 0 || ftruncate(file_, static_cast<off_t>(bytes)) != 0) fail("memfd_create");
    map();
  }
  // The memory of another process.
  SharedMemory(size_t bytes, const Handle& handle) : bytes_(bytes) {
    Name name{};
    if (handle.size() != sizeof name) {
      throw std::runtime_error("jaxkv: symmetric memory: handle of " +
                               std::to_string(handle.size()) + " bytes, expected " +
                               std::to_string(sizeof name));
    }
    std::memcpy(&name, handle.data(), sizeof name);
    const std::string path =
        "/proc/" + std::to_string(name.process) + "/fd/" + std::to_string(name.file);
    file_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file_ < 0) fail(path);
    map();
    if (name_.device != name.device || name_.inode != name.inode) {
      errno = ESTALE;  // a process in another container can have the same pid
      fail(path);
    }
  }
  SharedMemory(const SharedMemory&) = delete;
  ~SharedMemory() { release(); }

  Header* header() const { return static_cast<Header*>(address_); }
  Handle handle() const {
    const auto* bytes = reinterpret_cast<const uint8_t*>(&name_);
    return Handle(bytes, bytes + sizeof name_);
  }

 private:
  struct Name {
    int64_t process, file;
    uint64_t device, inode;
  };

  void map() {
    struct stat status{};
    if (fstat(file_, &status) != 0) fail("fstat");
    name_ = {getpid(), file_, status.st_dev, status.st_ino};
    if (static_cast<uint64_t>(status.st_size) < bytes_) {  // an access beyond it would be a SIGBUS
      release();
      throw std::runtime_error("jaxkv: symmetric memory: that of a peer has " +
                               std::to_string(status.st_size) + " bytes, expected " +
                               std::to_string(bytes_) + ": create it with equal arguments");
    }
    address_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (address_ == MAP_FAILED) fail("mmap of " + std::to_string(bytes_) + " bytes");
  }
  void release() const {
    if (address_ != MAP_FAILED) munmap(address_, bytes_);
    if (file_ >= 0) ::close(file_);
  }
  // Cleanup for constructors: the destructor does not run if one throws.
  [[noreturn]] void fail(const std::string& what) const {
    const int code = errno;
    release();
    throw std::runtime_error("jaxkv: symmetric memory: " + what + ": " +
                             std::generic_category().message(code));
  }

  size_t bytes_;
  int file_ = -1;
  void* address_ = MAP_FAILED;
  Name name_{};
};

// Ranks are devices of CPU backends.
class CpuCommunicator : public Communicator {
 public:
  using Communicator::Communicator;

  void unmap() override { peer_memory_.clear(); }

  void initialize(const Header& header, uint32_t ll_value) override {
    const Word word{{ll_value, ll_value, ll_value, ll_value}};
    for_each_local([&](Rank& rank) {
      *rank.header() = header;
      std::fill_n(receive_buffers_of(rank.header()), geometry_.all_ll_words(), word);
    });
  }

 protected:
  Header* allocate_memory(Rank& rank, const std::vector<int32_t>&) override {
    rank.view.fault = faults_.emplace_back(std::make_unique<PeerFault>()).get();
    return own_[&rank].emplace(memory_bytes()).header();
  }
  Handle handle_of(const Rank& rank) override { return own_.at(&rank)->handle(); }
  void allocate_multicast(const std::vector<std::unique_ptr<Rank>>& group) override {
    auto& emulated = switches_.emplace_back(std::make_unique<Switch>());
    for (size_t i = 0; i < group.size(); ++i) {
      emulated->memory[i].resize(geometry_.multicast_words);
      emulated->words[i] = group[i]->view.staged = emulated->memory[i].data();
      group[i]->view.multicast_staged = {reinterpret_cast<uintptr_t>(emulated->words)};
    }
  }
  Header* map_memory(const Rank&, const Handle& handle) override {
    return peer_memory_.emplace_back(std::make_unique<SharedMemory>(memory_bytes(), handle))
        ->header();
  }

 private:
  struct Switch {
    std::vector<Word> memory[kMaxRanks];
    Word* words[kMaxRanks];
  };

  std::unordered_map<const Rank*, std::optional<SharedMemory>> own_;
  std::vector<std::unique_ptr<Switch>> switches_;
  std::vector<std::unique_ptr<SharedMemory>> peer_memory_;
  std::vector<std::unique_ptr<PeerFault>> faults_;
};

// Atomics must also work across processes, which map the memory at different addresses.
static_assert(std::atomic_ref<uint64_t>::is_always_lock_free);
static_assert(std::atomic_ref<uint32_t>::is_always_lock_free);

}  // namespace

std::shared_ptr<Communicator> make_cpu_communicator(Geometry geometry,
                                                    const ByRank<int32_t>& devices,
                                                    uint64_t timeout_ns) {
  auto communicator = std::make_shared<CpuCommunicator>(geometry, devices, timeout_ns);
  communicator->allocate();
  return communicator;
}

}  // namespace jaxkv::collectives
