#include "common/error_ring.h"

#include <algorithm>
#include <atomic>
#include <mutex>

namespace jaxkv {
namespace {

struct RegisteredRing {
  const volatile ErrorRing* ring;
  uint64_t seen;
};

std::mutex mutex;

std::vector<RegisteredRing>& rings() {
  static auto* all =
      new std::vector<RegisteredRing>;  // leaked: handlers may outlive static objects
  return *all;
}

ErrorRing host_ring;

std::vector<std::string>& bound_names() {
  static auto* all = new std::vector<std::string>;
  return *all;
}

ErrorEntry copy_entry(const volatile ErrorEntry& e) {
  const uint64_t sequence = e.sequence;
  std::atomic_thread_fence(std::memory_order_acquire);  // a kernel writes it last
  return {e.fault, e.position, e.id, e.limit, sequence};
}

}  // namespace

void register_ring(const volatile ErrorRing* ring) {
  std::lock_guard lock(mutex);
  rings().push_back({ring, 0});
}

void record_host_error(ErrorCode fault, int32_t position, int32_t id, int32_t limit) {
  static std::once_flag watched;
  std::call_once(watched, [] { register_ring(&host_ring); });
  std::lock_guard lock(mutex);
  auto slot = host_ring.count++;
  host_ring.entries[slot % ErrorRing::kEntries] = {fault, position, id, limit, slot + 1};
  ++host_ring.written;
}

TakenErrors take_errors() {
  std::lock_guard lock(mutex);
  TakenErrors taken;
  for (auto& [ring, seen] : rings()) {
    const uint64_t written = ring->written;
    std::atomic_thread_fence(std::memory_order_acquire);
    const uint64_t count = ring->count;
    // Where writers lap each other, the older one may be the last; nothing is to come then.
    const bool complete = written == count;
    const uint64_t kept = std::min<uint64_t>(count - seen, ErrorRing::kEntries);
    uint64_t slot = count - kept;
    for (; slot < count; ++slot) {
      auto entry = copy_entry(ring->entries[slot % ErrorRing::kEntries]);
      if (!complete && entry.sequence < slot + 1) break;  // not written yet: the next call's
      if (entry.sequence == slot + 1) taken.details.push_back(entry);
    }
    taken.count += slot - seen;
    seen = slot;
  }
  return taken;
}

int32_t bound_code(const std::string& name) {
  std::lock_guard lock(mutex);
  auto& names = bound_names();
  const auto found = std::ranges::find(names, name);
  if (found == names.end()) names.push_back(name);
  return static_cast<int32_t>(std::ranges::find(names, name) - names.begin());
}

std::string describe(const ErrorEntry& e) {
  const std::string where = " at position " + std::to_string(e.position);
  switch (e.fault) {
    case ErrorCode::kSourceOutOfRange:
      return "source id " + std::to_string(e.id) + where + " is outside [0, " +
             std::to_string(e.limit) + ") pages";
    case ErrorCode::kDestinationOutOfRange:
      return "destination id " + std::to_string(e.id) + where + " is outside [0, " +
             std::to_string(e.limit) + ") pages";
    case ErrorCode::kDuplicate:
      return "destination id " + std::to_string(e.id) + where + " is named more than once";
    case ErrorCode::kCopiedBeforeWait:
      return "array " + std::to_string(e.id) + " of a started copy was copied by XLA before its " +
             "wait for segment " + std::to_string(e.position) +
             ": donate the transfer to the jit that waits for it";
    case ErrorCode::kWaitTimeout:
      return "segment " + std::to_string(e.position) +
             " of a started copy did not arrive in time: " + "number " + std::to_string(e.id) +
             " was wanted, " + std::to_string(e.limit) + " was reached";
    case ErrorCode::kColumnOutOfRange:
      return "row " + std::to_string(e.position) + " needs column " + std::to_string(e.id) +
             " of a block table of " + std::to_string(e.limit) + " columns";
    case ErrorCode::kBoundExceeded: {
      std::lock_guard lock(mutex);
      return bound_names().at(e.position) + " = " + std::to_string(e.id) +
             " exceeds its bound of " + std::to_string(e.limit);
    }
  }
  return "unknown fault";
}

}  // namespace jaxkv
