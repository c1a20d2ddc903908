#include "symmetric_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <unordered_map>

namespace jaxkv {
namespace {

using Registry = std::unordered_map<int64_t, std::shared_ptr<Communicator>>;

std::mutex mutex;

Registry& communicators() {
  static auto* all = new Registry;  // leaked
  return *all;
}

// Closed here, but peers may still write to their memory.
Registry& closed_communicators() {
  static auto* all = new Registry;
  return *all;
}

// By signature.
std::unordered_map<uint64_t, std::string>& call_names() {
  static auto* all = new std::unordered_map<uint64_t, std::string>;
  return *all;
}

std::shared_ptr<Communicator> take(Registry& from, int64_t id) {
  std::lock_guard lock(mutex);
  const auto found = from.find(id);
  if (found == from.end()) return nullptr;
  auto taken = std::move(found->second);
  from.erase(found);
  return taken;
}

// Memory that other processes can map as well. It has no name that could outlive them: they open
// the file by way of this process's descriptor.
class SharedMemory {
 public:
  // New memory, all zero.
  explicit SharedMemory(size_t bytes) : bytes_(bytes), file_(memfd_create("jaxkv", MFD_CLOEXEC)) {
    if (file_ < 0 || ftruncate(file_, static_cast<off_t>(bytes)) != 0) fail("memfd_create");
    map();
  }
  // The memory of another process.
  SharedMemory(size_t bytes, const Handle& handle) : bytes_(bytes) {
    Name name{};
    if (handle.size() != sizeof name) throw std::runtime_error("jaxkv: not a handle of memory");
    std::memcpy(&name, handle.data(), sizeof name);
    const std::string path =
        "/proc/" + std::to_string(name.process) + "/fd/" + std::to_string(name.file);
    file_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file_ < 0) fail(path);
    map();
    if (name_.device == name.device && name_.inode == name.inode) return;
    errno = ESTALE;  // a process of another container has the same number
    fail(path);
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
    address_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (address_ == MAP_FAILED) fail(std::to_string(bytes_) + " bytes");
  }
  void release() const {
    if (address_ != MAP_FAILED) munmap(address_, bytes_);
    if (file_ >= 0) ::close(file_);
  }
  // For constructors, after which no destructor runs.
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
class HostCommunicator : public Communicator {
 public:
  using Communicator::Communicator;

  void unmap() override { of_peers_.clear(); }

  void preset(uint64_t epoch, uint64_t ahead) override {
    const size_t quick_bytes = geometry_.all_quick_words() * sizeof(Word);
    for_each_own([&](Rank& rank) {
      *rank.header() = preset_header(epoch, ahead);
      std::memset(static_cast<void*>(mail_of(rank.header())), ahead ? 0 : 0xFF, quick_bytes);
    });
  }

 protected:
  Header* allocate_memory(Rank& rank, const std::vector<int32_t>&) override {
    rank.view.fault = faults_.emplace_back(std::make_unique<PeerFault>()).get();
    return own_[&rank].emplace(memory_bytes()).header();
  }
  Handle handle_of(const Rank& rank) override { return own_.at(&rank)->handle(); }
  void allocate_multicast(const std::vector<std::unique_ptr<Rank>>& group) override {
    auto& all = switches_.emplace_back(std::make_unique<Switch>());
    for (size_t i = 0; i < group.size(); ++i) {
      all->memory[i].resize(geometry_.multicast_words);
      all->words[i] = group[i]->view.staged = all->memory[i].data();
      group[i]->view.all_staged = {reinterpret_cast<uintptr_t>(all->words)};
    }
  }
  Header* map_memory(const Rank&, const Handle& handle) override {
    return of_peers_.emplace_back(std::make_unique<SharedMemory>(memory_bytes(), handle))->header();
  }

 private:
  struct Switch {
    std::vector<Word> memory[kMaxRanks];
    Word* words[kMaxRanks];
  };

  std::unordered_map<const Rank*, std::optional<SharedMemory>> own_;
  std::vector<std::unique_ptr<Switch>> switches_;
  std::vector<std::unique_ptr<SharedMemory>> of_peers_;
  std::vector<std::unique_ptr<PeerFault>> faults_;
};

// Atomic also for the other process, which has them at other addresses.
static_assert(std::atomic_ref<uint64_t>::is_always_lock_free);
static_assert(std::atomic_ref<uint32_t>::is_always_lock_free);

}  // namespace

Communicator::Communicator(Geometry geometry, const ByRank<int32_t>& devices, uint64_t timeout_ns)
    : geometry_(geometry) {
  for (const auto& ordinals : devices) {
    auto& group = groups_.emplace_back();
    for (size_t rank = 0; rank < ordinals.size(); ++rank) {
      auto& entry = group.emplace_back(std::make_unique<Rank>());
      entry->device = ordinals[rank];
      entry->view.geometry = geometry;
      entry->view.rank = static_cast<int32_t>(rank);
      entry->view.timeout_ns = timeout_ns;
    }
  }
}

void Communicator::allocate() {
  for (auto& group : groups_) {
    std::vector<int32_t> devices;
    for (const auto& rank : group) {
      if (rank->own()) devices.push_back(rank->device);
    }
    for (size_t i = 0; i < group.size(); ++i) {
      if (!group[i]->own()) continue;
      Header* memory = allocate_memory(*group[i], devices);
      for (auto& peer : group) {
        if (peer->own()) peer->view.headers[i] = memory;
      }
    }
    if (geometry_.multicast_words) allocate_multicast(group);
  }
  preset(0, 0);
}

ByRank<Handle> Communicator::handles() {
  ByRank<Handle> all;
  for (auto& group : groups_) {
    auto& of_group = all.emplace_back();
    for (auto& rank : group) of_group.push_back(rank->own() ? handle_of(*rank) : Handle{});
  }
  return all;
}

void Communicator::map(const ByRank<Handle>& handles) {
  for (size_t g = 0; g < groups_.size(); ++g) {
    for (auto& rank : groups_[g]) {
      for (size_t i = 0; rank->own() && i < groups_[g].size(); ++i) {
        if (!groups_[g][i]->own()) rank->view.headers[i] = map_memory(*rank, handles.at(g).at(i));
      }
    }
  }
}

bool Communicator::spans_processes() const {
  return std::ranges::any_of(groups_, [](const auto& group) {
    const auto own = std::ranges::count_if(group, [](const auto& rank) { return rank->own(); });
    return own != 0 && own != std::ssize(group);
  });
}

Communicator::Rank* Communicator::on_device(int32_t device) {
  for (auto& group : groups_) {
    for (auto& rank : group) {
      if (rank->own() && rank->device == device) return rank.get();
    }
  }
  return nullptr;
}

void Communicator::set_stall(uint64_t nanoseconds) {
  for (auto& group : groups_) {
    for (auto& rank : group) rank->view.stall_ns = nanoseconds;
  }
}

std::optional<PeerFault> Communicator::fault() const {
  std::optional<PeerFault> found;
  for (const auto& group : groups_) {
    for (const auto& rank : group) {
      PeerFault* fault = rank->view.fault;
      if (!fault || !std::atomic_ref(fault->recorded).load(std::memory_order_acquire)) continue;
      // The rank that waited in vain knows more than those that it told.
      if (!found || found->phase == Phase::kAborted) found = *fault;
    }
  }
  return found;
}

Header preset_header(uint64_t epoch, uint64_t ahead) {
  Header header{};
  header.progress.epoch = epoch;
  for (auto& of_block : header.signals.flags) {
    for (auto& flag : of_block) flag = epoch + ahead;
  }
  return header;
}

const char* name_of(Phase phase) {
  switch (phase) {
    case Phase::kQuick:
      return "low_latency";
    case Phase::kBarrier:
      return "barrier";
    case Phase::kScatter:
      return "scatter";
    case Phase::kGather:
      return "gather";
    case Phase::kAborted:
      return "aborted";
    case Phase::kCall:
      return "call";
    case Phase::kMismatch:
      return "mismatch";
  }
  return "unknown";
}

std::string describe(const PeerFault& fault) {
  const std::string rank = "rank " + std::to_string(fault.rank);
  const std::string peer = "rank " + std::to_string(fault.peer);
  if (fault.phase == Phase::kAborted) return rank + " stopped, because " + peer + " gave up";
  const std::string called = " has called " + describe_call(fault.call) + ", but " + peer;
  if (fault.phase == Phase::kMismatch) return rank + called + " " + describe_call(fault.peer_call);
  return rank + " waited in vain for " + peer + " in phase " + name_of(fault.phase) +
         ": expected " + std::to_string(fault.expected) + ", seen " + std::to_string(fault.seen) +
         "; " + rank + called + " last " + describe_call(fault.peer_call);
}

void name_call(uint64_t signature, std::string description) {
  std::lock_guard lock(mutex);
  call_names()[signature] = std::move(description);
}

std::string describe_call(uint64_t mark) {
  if (!mark) return "nothing";
  const std::string number = " (call " + std::to_string(mark % kCallNumbers) + ")";
  std::lock_guard lock(mutex);
  const auto found = call_names().find(mark / kCallNumbers);
  return (found == call_names().end() ? "what this process has not lowered" : found->second) +
         number;
}

std::shared_ptr<Communicator> make_host_communicator(Geometry geometry,
                                                     const ByRank<int32_t>& devices,
                                                     uint64_t timeout_ns) {
  auto communicator = std::make_shared<HostCommunicator>(geometry, devices, timeout_ns);
  communicator->allocate();
  return communicator;
}

int64_t register_communicator(std::shared_ptr<Communicator> communicator) {
  static int64_t next = 1;
  std::lock_guard lock(mutex);
  communicators()[next] = std::move(communicator);
  return next++;
}

std::shared_ptr<Communicator> find_communicator(int64_t id) {
  std::lock_guard lock(mutex);
  const auto found = communicators().find(id);
  return found == communicators().end() ? nullptr : found->second;
}

void close_communicator(int64_t id) {
  auto closed = take(communicators(), id);
  if (!closed || !closed->spans_processes()) return;  // the last call's end is that of the memory
  // Calls that still run hold it, until their time is over at the latest; no other can begin.
  while (closed.use_count() > 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  closed->unmap();
  std::lock_guard lock(mutex);
  closed_communicators()[id] = std::move(closed);
}

void free_communicator(int64_t id) { take(closed_communicators(), id); }

xla::ffi::ErrorOr<std::shared_ptr<Communicator>> usable_communicator(int64_t id) {
  auto communicator = find_communicator(id);
  if (!communicator) {
    return xla::ffi::Unexpected(xla::ffi::Error::InvalidArgument(
        "jaxkv: this executable's SymmetricMemory was closed: compile it with a new one"));
  }
  if (const auto fault = communicator->fault()) {
    return xla::ffi::Unexpected(xla::ffi::Error::Internal("PeerTimeoutError: " + describe(*fault)));
  }
  return communicator;
}

}  // namespace jaxkv
