// Backend-independent part of symmetric memory: setup of communicators, their registry, and the
// description of faults.
#include "collectives/symmetric_memory.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <unordered_map>

namespace jaxkv::collectives {

namespace {

using Registry = std::unordered_map<int64_t, std::shared_ptr<Communicator>>;

std::mutex mutex;

Registry& communicators() {
  static auto* all = new Registry;  // leaked
  return *all;
}

// Closed in this process, but peers may still write to their memory.
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

}  // namespace

Communicator::Communicator(Geometry geometry, const ByRank<int32_t>& devices, uint64_t timeout_ns)
    : geometry_(geometry) {
  const auto size = static_cast<size_t>(geometry.world_size);
  if (size < 2 || size > kMaxRanks || size % 2 != 0 ||
      !std::ranges::all_of(devices, [=](const auto& group) { return group.size() == size; })) {
    throw std::invalid_argument(
        "jaxkv: symmetric memory: groups must have 2, 4, 6 or 8 devices "
        "each, got a first group of " +
        std::to_string(size));
  }
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
  // Several processes compile the program of the first call at different speeds.
  const uint64_t first = spans_processes() ? kFirstCallTimeouts * timeout_ns : timeout_ns;
  for_each_local([=](Rank& rank) { rank.view.first_timeout_ns = first; });
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
  initialize(Header{}, kUnset);
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

void Communicator::limit_blocks(const BlockLimits& limits) {
  if (limits.size() != block_limits_.size() || std::ranges::min(limits) < 1) {
    throw std::invalid_argument("jaxkv: symmetric memory: needs a limit of blocks of each kernel");
  }
  for (size_t i = 0; i < limits.size(); ++i) {
    block_limits_[i] = std::min(block_limits_[i], limits[i]);
  }
}

std::optional<PeerFault> Communicator::fault() const {
  std::optional<PeerFault> found;
  for (const auto& group : groups_) {
    for (const auto& rank : group) {
      PeerFault* fault = rank->view.fault;
      if (!fault || !std::atomic_ref(fault->recorded).load(std::memory_order_acquire)) continue;
      // The rank that timed out has more information than the ranks that it aborted.
      if (!found || found->phase == Phase::kAborted) found = *fault;
    }
  }
  return found;
}

const char* name_of(Phase phase) {
  switch (phase) {
    case Phase::kLowLatency:
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
  if (fault.phase == Phase::kAborted) {
    const std::string first = "rank " + std::to_string(fault.timed_out);
    return rank + " aborted, because " + first + " timed out" +
           (fault.peer == fault.timed_out ? "" : " waiting for " + peer);
  }
  const std::string called = " has called " + describe_call(fault.call) + ", but " + peer;
  if (fault.phase == Phase::kMismatch)
    return rank + called + " has called " + describe_call(fault.peer_call);
  return rank + " timed out waiting for " + peer + " in phase " + name_of(fault.phase) +
         ": expected " + std::to_string(fault.expected) + ", seen " + std::to_string(fault.seen) +
         "; " + rank + called + " last called " + describe_call(fault.peer_call);
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
  return (found == call_names().end() ? "a call that this process has not lowered"
                                      : found->second) +
         number;
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
  if (!closed || !closed->spans_processes()) return;  // freed when the last call ends
  // Calls that execute own a reference, until their timeout at the latest, and none can begin. The
  // launch of a CUDA graph owns none: it has only passed the prepare stage, and could use the
  // memory after this. Therefore nothing may be dispatched concurrently.
  while (closed.use_count() > 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  closed->unmap();
  std::lock_guard lock(mutex);
  closed_communicators()[id] = std::move(closed);
}

void free_communicator(int64_t id) { take(closed_communicators(), id); }

xla::ffi::ErrorOr<std::shared_ptr<Communicator>> usable_communicator(int64_t id) {
  auto communicator = find_communicator(id);
  if (!communicator) {
    return xla::ffi::Unexpected(
        xla::ffi::Error::InvalidArgument("jaxkv all_reduce: the executable's SymmetricMemory was "
                                         "closed; trace the program again with a new one"));
  }
  if (const auto fault = communicator->fault()) {
    return xla::ffi::Unexpected(xla::ffi::Error::Internal("PeerTimeoutError: " + describe(*fault)));
  }
  return communicator;
}

}  // namespace jaxkv::collectives
