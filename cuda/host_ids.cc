#include "host_ids.h"

#include <atomic>
#include <cstring>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <unordered_map>

namespace jaxkv {
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

// What an address was admitted with.
struct Admission {
  size_t num_words;
  uint64_t serial;
};

std::optional<Header> read_header(std::span<const int32_t> words) {
  if (words.size() < kHostIdsHeader) return std::nullopt;
  Header header;
  std::memcpy(&header, words.data(), sizeof header);
  const auto ids = words.subspan(kHostIdsHeader);
  const bool sealed = header.magic == kMagic && static_cast<size_t>(header.length) == ids.size() &&
                      header.checksum == checksum(header.serial, ids);
  return sealed ? std::optional(header) : std::nullopt;
}

struct Admitted {
  std::mutex mutex;
  // One entry for each address ever used: bounded by what the allocator of the host memory
  // recycles.
  std::unordered_map<const int32_t*, Admission> by_address;

  std::optional<Admission> at(const int32_t* address) {
    std::lock_guard lock(mutex);
    const auto found = by_address.find(address);
    return found == by_address.end() ? std::nullopt : std::optional(found->second);
  }
};

Admitted& admitted() {
  static auto* all = new Admitted;  // leaked: handlers may outlive static objects
  return *all;
}

}  // namespace

void seal_host_ids(std::span<int32_t> words) {
  static std::atomic<uint64_t> next_serial{1};
  if (words.size() < kHostIdsHeader) throw std::invalid_argument("no room for the header");
  const auto ids = words.subspan(kHostIdsHeader);
  Header header{kMagic, static_cast<int32_t>(ids.size()), next_serial++, 0, 0};
  header.checksum = checksum(header.serial, ids);
  std::memcpy(words.data(), &header, sizeof header);
}

void admit_host_ids(const int32_t* address, size_t num_words) {
  const auto header = read_header({address, num_words});
  if (!header) throw std::invalid_argument("no sealed ids at this address");
  std::lock_guard lock(admitted().mutex);
  admitted().by_address[address] = {num_words, header->serial};
}

bool open_host_ids(const int32_t* address, size_t num_words, std::string* why_not) {
  // The address first: what was never admitted may be memory that the host can't read.
  const auto admission = admitted().at(address);
  if (!admission || admission->num_words != num_words) {
    *why_not = "made or copied by a computation, or stale; build HostIds from NumPy";
    return false;
  }
  const auto header = read_header({address, num_words});
  if (!header) {
    *why_not = "no valid header any more, so overwritten; build HostIds from NumPy";
    return false;
  }
  if (header->serial != admission->serial) {
    *why_not = "other ids, whose copy by a computation is stale here; build HostIds from NumPy";
    return false;
  }
  return true;
}

}  // namespace jaxkv
