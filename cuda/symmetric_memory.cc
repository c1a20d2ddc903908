#include "symmetric_memory.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <unordered_map>

namespace jaxkv {
namespace {

std::mutex mutex;

auto& communicators() {
  static auto* all = new std::unordered_map<int64_t, std::shared_ptr<Communicator>>;  // leaked
  return *all;
}

// Ranks are devices of the CPU backend in this process, so ordinary memory is symmetric.
class HostCommunicator : public Communicator {
 public:
  using Communicator::Communicator;

  void allocate() {
    const size_t bytes = sizeof(Header) + geometry_.mail_words() * sizeof(Word);
    for (auto& group : groups_) {
      for (size_t i = 0; i < group.size(); ++i) {
        memory_.emplace_back(bytes / sizeof(Word));
        faults_.push_back(std::make_unique<PeerFault>());
        group[i]->view.fault = faults_.back().get();
        auto* header = reinterpret_cast<Header*>(memory_.back().data());
        for (auto& peer : group) peer->view.headers[i] = header;
      }
    }
    preset(0, 0);
  }

  void preset(uint64_t epoch, uint64_t ahead) override {
    const size_t quick_bytes = geometry_.all_quick_words() * sizeof(Word);
    for (auto& words : memory_) {
      auto* header = reinterpret_cast<Header*>(words.data());
      *header = preset_header(epoch, ahead);
      std::memset(static_cast<void*>(mail_of(header)), ahead ? 0 : 0xFF, quick_bytes);
    }
  }

 private:
  std::vector<std::vector<Word>> memory_;
  std::vector<std::unique_ptr<PeerFault>> faults_;
};

}  // namespace

Communicator::Communicator(Geometry geometry, const std::vector<std::vector<int32_t>>& devices,
                           uint64_t timeout_ns)
    : geometry_(geometry) {
  const char* debug = std::getenv("JAXKV_DEBUG_COLLECTIVES");
  for (const auto& ordinals : devices) {
    auto& group = groups_.emplace_back();
    for (size_t rank = 0; rank < ordinals.size(); ++rank) {
      auto& entry = group.emplace_back(std::make_unique<Rank>());
      entry->device = ordinals[rank];
      entry->view.geometry = geometry;
      entry->view.rank = static_cast<int32_t>(rank);
      entry->view.timeout_ns = timeout_ns;
      entry->view.debug = debug && std::string(debug) == "1";
    }
  }
}

Communicator::Rank* Communicator::on_device(int32_t device) {
  for (auto& group : groups_) {
    for (auto& rank : group) {
      if (rank->device == device) return rank.get();
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
  if (fault.phase == Phase::kMismatch) {
    return rank + " has called " + describe_call(fault.expected) + ", but " + peer + " " +
           describe_call(fault.seen);
  }
  if (fault.phase == Phase::kCall) {
    return rank + " waited in vain for " + peer + " to call " + describe_call(fault.expected) +
           "; its last call was " + describe_call(fault.seen);
  }
  return rank + " waited in vain for " + peer + " in phase " + name_of(fault.phase) +
         ": expected " + std::to_string(fault.expected) + ", seen " + std::to_string(fault.seen);
}

std::shared_ptr<Communicator> make_host_communicator(
    Geometry geometry, const std::vector<std::vector<int32_t>>& devices, uint64_t timeout_ns) {
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
  std::shared_ptr<Communicator> closed;  // its destructor runs without the lock
  std::lock_guard lock(mutex);
  const auto found = communicators().find(id);
  if (found == communicators().end()) return;
  closed = std::move(found->second);
  communicators().erase(found);
}

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
