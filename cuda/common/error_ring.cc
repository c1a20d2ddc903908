#include "common/error_ring.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace jaxkv {
namespace {

struct RegisteredRings {
  const volatile ErrorRings* rings;
  int32_t device;
  Scope scope;
  uint64_t seen[kErrorKinds];
};

using Names = std::unordered_map<int32_t, std::string>;

constexpr std::string_view kSeparator = ": ";  // of an operation and its bound

std::mutex mutex;

// The following are leaked: handlers may outlive static objects.

std::vector<RegisteredRings>& registered() {
  static auto* all = new std::vector<RegisteredRings>;
  return *all;
}

std::map<Scope, ErrorRings>& host_rings() {
  static auto* all = new std::map<Scope, ErrorRings>;
  return *all;
}

Names& bound_names() {
  static auto* all = new Names;
  return *all;
}

Names& scope_names() {
  static auto* all = new Names;
  return *all;
}

// Written once each, in order, then counted: read without a lock by every call.
std::array<std::atomic<Scope>, kMaxScopes> scopes{};
std::atomic<size_t> num_scopes = 1;  // with the default scope

// Adds a name; returns its number.
int32_t add_name(const std::string& name, Names& names) {
  uint32_t hash = 0x811c9dc5;  // FNV-1a
  for (const char byte : name) hash = (hash ^ static_cast<uint8_t>(byte)) * 0x01000193;
  const auto code = static_cast<int32_t>(std::max(hash & INT32_MAX, 1u));
  const std::string& known = names.emplace(code, name).first->second;
  if (known == name) return code;
  throw std::invalid_argument("the names '" + known + "' and '" + name +
                              "' have the same hash; choose another name");
}

// Whether the source ids are positions of tokens, and the destination ids pages of the pool.
bool has_positions(const ErrorEntry& e) {
  const auto operation = static_cast<Operation>(e.fault >> 8);
  return operation == Operation::kSparseFetch || operation == Operation::kSparseAppend;
}

// Whether all ids are blocks of recurrent states.
bool has_states(const ErrorEntry& e) {
  const auto operation = static_cast<Operation>(e.fault >> 8);
  return operation == Operation::kAlignPreprocess || operation == Operation::kAlignPostprocess;
}

// Operation and name of a bound; empty if unknown, as in a program that another process compiled.
std::pair<std::string, std::string> bound_name_of(const ErrorEntry& e) {
  std::lock_guard lock(mutex);
  const auto found = bound_names().find(e.position);
  if (found == bound_names().end()) return {};
  const size_t end = found->second.find(kSeparator);
  return {found->second.substr(0, end), found->second.substr(end + kSeparator.size())};
}

const OperationNames& names_of(const ErrorEntry& e) {
  const int32_t operation = e.fault >> 8;
  return kOperationNames[operation >= 0 && operation < kOperations ? operation : 0];
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

void register_rings(const volatile ErrorRings* rings, int32_t device, Scope scope) {
  std::lock_guard lock(mutex);
  registered().push_back({rings, device, scope, {}});
}

void record_host_error(Scope scope, Fault fault, int32_t position, int32_t id, int32_t limit) {
  const ErrorEntry entry{fault.word, position, id, limit, 0};
  record_host_errors(scope, {&entry, 1}, 1);
}

void record_host_errors(Scope scope, std::span<const ErrorEntry> first, uint64_t count) {
  if (scope_index(scope) == 0) scope = Scope::kDefault;
  std::lock_guard lock(mutex);
  const auto [rings, added] = host_rings().try_emplace(scope);
  if (added) registered().push_back({&rings->second, kHostChecked, scope, {}});
  ErrorRing& ring = rings->second.of(code_of(first.front()));
  ring.count += count - first.size();  // counted only, as if the others had replaced them
  for (ErrorEntry entry : first) {
    entry.sequence = ring.count + 1;
    ring.entries[ring.count++ % ErrorRing::kEntries] = entry;
  }
  ring.written = ring.count;
}

std::vector<TakenErrors> take_errors(Scope scope) {
  std::lock_guard lock(mutex);
  std::vector<TakenErrors> all;
  for (int kind = 0; kind < kErrorKinds; ++kind) {
    for (auto& [rings, device, of, seen] : registered()) {
      if (of != scope) continue;
      auto taken = take(rings->of_kind[kind], static_cast<ErrorKind>(kind), device, seen[kind]);
      if (taken.count) all.push_back(std::move(taken));
    }
  }
  return all;
}

int32_t bound_code(const std::string& operation, const std::string& bound) {
  std::lock_guard lock(mutex);
  return add_name(operation + std::string(kSeparator) + bound, bound_names());
}

Scope register_scope(const std::string& name) {
  std::lock_guard lock(mutex);
  const auto scope = static_cast<Scope>(add_name(name, scope_names()));
  if (scope_index(scope)) return scope;
  const size_t index = num_scopes.load();
  if (index == kMaxScopes) {
    scope_names().erase(static_cast<int32_t>(scope));
    throw std::invalid_argument("'" + name + "' would be scope " + std::to_string(index) +
                                " of this process, the limit is " + std::to_string(kMaxScopes - 1) +
                                "; reuse the names");
  }
  scopes[index].store(scope);
  num_scopes.store(index + 1);
  return scope;
}

size_t scope_index(Scope scope) {
  if (scope == Scope::kDefault) return 0;
  size_t index = num_scopes.load() - 1;
  while (index && scopes[index].load() != scope) --index;
  return index;
}

ErrorCode code_of(const ErrorEntry& e) { return static_cast<ErrorCode>(e.fault & 0xff); }

std::string operation_of(const ErrorEntry& e) {
  const bool of_bound = code_of(e) == ErrorCode::kBoundExceeded;
  return of_bound ? bound_name_of(e).first : names_of(e).operation;
}

std::string argument_of(const ErrorEntry& e) {
  if (kind_of(code_of(e)) != ErrorKind::kPageIndex) return "";
  const bool source = code_of(e) == ErrorCode::kSourceOutOfRange ||
                      (code_of(e) == ErrorCode::kDuplicate && has_positions(e));
  return source ? names_of(e).source_ids : names_of(e).destination_ids;
}

// The segment of an asynchronous copy, in the terms of its operation.
std::string segment_of(const ErrorEntry& e) {
  const bool swap = operation_of(e) == "start_swap";
  return (swap ? "array " : "layer ") + std::to_string(e.position);
}

std::string describe(const ErrorEntry& e) {
  // "load_pages: host_pages[3]" if the operation is known.
  const std::string operation = operation_of(e);
  const std::string prefix = operation.empty() ? "" : operation + ": ";
  const std::string position = std::to_string(e.position);
  const auto entry = [&](const char* side) {
    const std::string id = std::to_string(e.id);
    if (operation.empty()) return std::string(side) + " id " + id + " at position " + position;
    const bool copies_pages = !has_positions(e) && !has_states(e);
    const std::string role = copies_pages ? std::string(side) + " id " : "";
    return prefix + role + argument_of(e) + "[" + position + "] = " + id;
  };
  const bool tokens = has_positions(e) && code_of(e) == ErrorCode::kSourceOutOfRange;
  const std::string range = " is outside [0, " + std::to_string(e.limit) + ") " +
                            (tokens          ? "tokens of the request"
                             : has_states(e) ? "blocks of the states"
                                             : "pages of this device");
  switch (code_of(e)) {
    case ErrorCode::kSourceOutOfRange:
      return entry("source") + range;
    case ErrorCode::kDestinationOutOfRange:
      return entry("destination") + range;
    case ErrorCode::kDuplicate:
      return entry("destination") + " is a duplicate";
    case ErrorCode::kCopiedBeforeWait:
      return prefix +
             "XLA copied an array of the handle before a wait; donate the handle to the "
             "jitted function that waits for it (with layers in stacked arrays, also pass "
             "after= to each wait, and use its slices before the next wait)";
    case ErrorCode::kWaitTimeout:
      return prefix + "wait for " + segment_of(e) +
             " in the order of the copy timed out: progress counter is " + std::to_string(e.limit) +
             ", expected " + std::to_string(e.id);
    case ErrorCode::kColumnOutOfRange:
      return prefix + "row " + position + " needs column " + std::to_string(e.id) +
             " of a block table of " + std::to_string(e.limit) + " columns";
    case ErrorCode::kBoundExceeded: {
      const std::string name = bound_name_of(e).second;
      return prefix + "the batch needs " + std::to_string(e.id) + ", more than " +
             (name.empty() ? "a bound of " : "the bound " + name + " = ") +
             std::to_string(e.limit) + ": raise the bound, or schedule fewer requests or tokens";
    }
  }
  return "unknown error code";
}

}  // namespace jaxkv
