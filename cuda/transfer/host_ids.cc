#include "transfer/host_ids.h"

#include <atomic>
#include <cstring>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>

namespace jaxkv::transfer {
namespace {

constexpr int32_t kMagic = 0x6b764964;  // "kvId"

struct Header {
  int32_t magic;
  int32_t length;
  uint64_t serial;
  uint64_t checksum;
  uint64_t unused;
};
static_assert(sizeof(Header) == kHostIdsHeader * sizeof(int32_t));

uint64_t checksum(uint64_t serial, std::span<const int32_t> ids) {
  uint64_t hash = 0xcbf29ce484222325ull ^ serial;
  for (int32_t id : ids) hash = (hash ^ static_cast<uint32_t>(id)) * 0x100000001b3ull;
  return hash;
}

std::optional<Header> read_header(std::span<const int32_t> words) {
  if (words.size() < kHostIdsHeader) return std::nullopt;
  Header header;
  std::memcpy(&header, words.data(), sizeof header);
  const auto ids = words.subspan(kHostIdsHeader);
  const bool sealed = header.magic == kMagic && static_cast<size_t>(header.length) == ids.size() &&
                      header.checksum == checksum(header.serial, ids);
  return sealed ? std::optional(header) : std::nullopt;
}

// Registration of an address, in a cache line of its own and read without a lock: calls run with
// cold caches, where every additional line is one more miss. A call that reads an entry while it is
// written rejects its ids; but no call uses ids that are still being created.
struct alignas(64) Registration {
  std::atomic<const int32_t*> address = nullptr;  // null in an empty chain; set once
  std::atomic<size_t> num_words = 0;
  std::atomic<uint64_t> serial = 0;
  std::atomic<Registration*> next = nullptr;
};

// Hash chains by address, with their first entries in the table. Entries are never removed: there
// is one for each address ever used, which is bounded because the allocator of the host memory
// recycles addresses.
constexpr int kLogChains = 12;
constinit Registration chains[1 << kLogChains];

Registration& chain_of(const int32_t* address) {
  const auto bits = reinterpret_cast<uintptr_t>(address);
  return chains[bits * 0x9e3779b97f4a7c15ull >> (64 - kLogChains)];
}

const Registration* registration_at(const int32_t* address) {
  const Registration* found = &chain_of(address);
  while (found && found->address.load(std::memory_order_acquire) != address) {
    found = found->next.load(std::memory_order_acquire);
  }
  return found;
}

// The entry to write for `address`. Must be serialized.
Registration& entry_for(const int32_t* address) {
  Registration* entry = &chain_of(address);
  while (entry->address && entry->address != address) {
    if (!entry->next) entry->next = new Registration;
    entry = entry->next;
  }
  return *entry;
}

}  // namespace

void write_host_ids_header(std::span<int32_t> words) {
  static std::atomic<uint64_t> next_serial{1};
  if (words.size() < kHostIdsHeader) {
    throw std::invalid_argument("HostIds: " + std::to_string(words.size()) +
                                " words, the header needs " + std::to_string(kHostIdsHeader));
  }
  const auto ids = words.subspan(kHostIdsHeader);
  Header header{kMagic, static_cast<int32_t>(ids.size()), next_serial++, 0, 0};
  header.checksum = checksum(header.serial, ids);
  std::memcpy(words.data(), &header, sizeof header);
}

void register_host_ids(const int32_t* address, size_t num_words) {
  const auto header = read_header({address, num_words});
  if (!header) throw std::invalid_argument("HostIds: no valid header at this address");
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  Registration& entry = entry_for(address);
  entry.num_words = num_words;
  entry.serial = header->serial;
  entry.address = address;  // last: publishes the entry to concurrent calls
}

const char* host_ids_error(const int32_t* address, size_t num_words) {
  // Address first: an unregistered one may be memory that the host cannot read.
  const Registration* registration = registration_at(address);
  if (!registration || registration->num_words != num_words) {
    return "created or copied by a computation, or stale; create HostIds from NumPy arrays";
  }
  const auto header = read_header({address, num_words});
  if (!header) return "overwritten (invalid header); create HostIds from NumPy arrays";
  if (header->serial != registration->serial) {
    return "stale copy of other ids by a computation; create HostIds from NumPy arrays";
  }
  return nullptr;
}

}  // namespace jaxkv::transfer
