#include "common/error_ring.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

namespace jaxkv {
namespace {

struct RegisteredRings {
  const volatile ErrorRings* rings;
  int32_t device;
  uint64_t seen[kErrorKinds];
};

std::mutex mutex;

std::vector<RegisteredRings>& registered() {
  static auto* all =
      new std::vector<RegisteredRings>;  // leaked: handlers may outlive static objects
  return *all;
}

ErrorRings host_rings;

std::vector<std::string>& bound_names() {
  static auto* all = new std::vector<std::string>;
  return *all;
}

ErrorEntry copy_entry(const volatile ErrorEntry& e) {
  const uint64_t sequence = e.sequence;
  std::atomic_thread_fence(std::memory_order_acquire);  // the writer stores it last
  return {e.fault, e.position, e.id, e.limit, sequence};
}

// Errors counted since `seen`; advances `seen` by their number.
TakenErrors take(const volatile ErrorRing& ring, ErrorKind kind, int32_t device, uint64_t& seen) {
  TakenErrors taken{kind, device, 0, {}};
  const uint64_t written = ring.written;
  std::atomic_thread_fence(std::memory_order_acquire);
  const uint64_t count = ring.count;
  // When writers wrap around the ring, the older one may write last. If `complete`, no write is
  // pending.
  const bool complete = written == count;
  const uint64_t kept = std::min<uint64_t>(count - seen, ErrorRing::kEntries);
  uint64_t slot = count - kept;
  for (; slot < count; ++slot) {
    auto entry = copy_entry(ring.entries[slot % ErrorRing::kEntries]);
    if (!complete && entry.sequence < slot + 1) break;  // not written yet: left for the next call
    if (entry.sequence == slot + 1) taken.details.push_back(entry);
  }
  taken.count = slot - seen;
  seen = slot;
  return taken;
}

}  // namespace

void register_rings(const volatile ErrorRings* rings, int32_t device) {
  std::lock_guard lock(mutex);
  registered().push_back({rings, device, {}});
}

void record_host_error(Fault fault, int32_t position, int32_t id, int32_t limit) {
  static std::once_flag registered_once;
  std::call_once(registered_once, [] { register_rings(&host_rings, kHostChecked); });
  std::lock_guard lock(mutex);
  ErrorRing& ring = host_rings.of(fault.code());
  auto slot = ring.count++;
  ring.entries[slot % ErrorRing::kEntries] = {fault.word, position, id, limit, slot + 1};
  ++ring.written;
}

std::vector<TakenErrors> take_errors() {
  std::lock_guard lock(mutex);
  std::vector<TakenErrors> all;
  for (int kind = 0; kind < kErrorKinds; ++kind) {
    for (auto& [rings, device, seen] : registered()) {
      auto taken = take(rings->of_kind[kind], static_cast<ErrorKind>(kind), device, seen[kind]);
      if (taken.count) all.push_back(std::move(taken));
    }
  }
  return all;
}

int32_t bound_code(const std::string& name) {
  std::lock_guard lock(mutex);
  auto& names = bound_names();
  const auto found = std::ranges::find(names, name);
  if (found == names.end()) names.push_back(name);
  return static_cast<int32_t>(std::ranges::find(names, name) - names.begin());
}

ErrorCode code_of(const ErrorEntry& e) { return static_cast<ErrorCode>(e.fault & 0xff); }

const OperationNames& operation_of(const ErrorEntry& e) {
  const int32_t operation = e.fault >> 8;
  return kOperationNames[operation >= 0 && operation < kOperations ? operation : 0];
}

std::string argument_of(const ErrorEntry& e) {
  if (kind_of(code_of(e)) != ErrorKind::kPageIndex) return "";
  const bool source = code_of(e) == ErrorCode::kSourceOutOfRange;
  return source ? operation_of(e).source_ids : operation_of(e).destination_ids;
}

std::string describe(const ErrorEntry& e) {
  // "load_pages: host_pages[3]" if the operation is known.
  const std::string operation = operation_of(e).operation;
  const std::string prefix = operation.empty() ? "" : operation + ": ";
  const std::string position = std::to_string(e.position);
  const auto entry = [&](const char* side) {
    const std::string id = std::to_string(e.id);
    return operation.empty()
               ? std::string(side) + " id " + id + " at position " + position
               : prefix + side + " id " + argument_of(e) + "[" + position + "] = " + id;
  };
  const std::string range = " is outside [0, " + std::to_string(e.limit) + ") pages";
  switch (code_of(e)) {
    case ErrorCode::kSourceOutOfRange:
      return entry("source") + range;
    case ErrorCode::kDestinationOutOfRange:
      return entry("destination") + range;
    case ErrorCode::kDuplicate:
      return entry("destination") + " is a duplicate";
    case ErrorCode::kCopiedBeforeWait:
      return prefix + "XLA copied array " + std::to_string(e.id) +
             " of an asynchronous copy before the wait for segment " + std::to_string(e.position) +
             "; donate the handle to the jitted function that waits for it";
    case ErrorCode::kWaitTimeout:
      return prefix + "wait for segment " + std::to_string(e.position) +
             " of an asynchronous copy timed out: progress counter is " + std::to_string(e.limit) +
             ", expected " + std::to_string(e.id);
    case ErrorCode::kColumnOutOfRange:
      return "row " + std::to_string(e.position) + " needs column " + std::to_string(e.id) +
             " of a block table of " + std::to_string(e.limit) + " columns";
    case ErrorCode::kBoundExceeded: {
      std::lock_guard lock(mutex);
      return bound_names().at(e.position) + " = " + std::to_string(e.id) +
             " exceeds its bound of " + std::to_string(e.limit);
    }
  }
  return "unknown error code";
}

}  // namespace jaxkv
