// Ids that the host may read when a call is enqueued: only those that the host itself wrote.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace jaxkv::transfer {

// int32 words before the ids: magic, length, serial (2), checksum (2), two unused.
inline constexpr size_t kHostIdsHeader = 8;

// Writes the header over `words`, whose first kHostIdsHeader entries are free.
void write_host_ids_header(std::span<int32_t> words);

// Says that sealed ids now lie at `address`; whatever was said of it before is forgotten.
// Throws std::invalid_argument if no sealed ids lie there.
void register_host_ids(const int32_t* address, size_t num_words);

// Why the ids can't be read now; null if they can. Ids that a computation copied here may not have
// arrived yet when a handler reads them, so an address must have been admitted; any other, which
// may be device memory, is not touched. (XLA keeps its pinned memory, so an address that was host
// memory once still is.) That is best effort: where such a copy is yet to arrive in the memory of
// freed ids of the same length, those still lie there whole and are taken for it.
const char* host_ids_error(const int32_t* address, size_t num_words);

}  // namespace jaxkv::transfer
