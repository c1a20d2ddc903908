// Ids that the host may read when a call is enqueued: only lists that the host itself wrote.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace jaxkv::transfer {

// int32 words before the ids: magic, length, serial (2), checksum (2), two unused.
inline constexpr size_t kHostIdsHeader = 8;

// Writes the header to `words`, whose first kHostIdsHeader entries are reserved for it.
void write_host_ids_header(std::span<int32_t> words);

// Registers the sealed ids at `address`, replacing an earlier registration. Throws
// std::invalid_argument if there are no sealed ids.
void register_host_ids(const int32_t* address, size_t num_words);

// The reason why the ids cannot be read now, or null if they can. Ids that a computation copied to
// this address may not have arrived when a handler reads them, so the address must be registered;
// memory at other addresses, which may be device memory, is not accessed. (XLA does not
// release pinned memory, so a registered address stays host memory.) Best effort: if such a copy is
// still in flight to the memory of freed ids of the same length, the freed ids are still intact
// there and are accepted instead.
const char* host_ids_error(const int32_t* address, size_t num_words);

}  // namespace jaxkv::transfer
