// The ticket that identifies a copy to its waits; free of CUDA headers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxkv::transfer {

// Written by a start to memory of XLA. If a wait receives another array than the one in `written`,
// XLA copied the array before the bytes arrived.
struct Ticket {
  uint16_t copy_stream;
  uint16_t operation;  // of the start, for errors
  uint32_t first;
  const void* written[];
};

// Arrays per launch of a kernel that reads or writes a ticket: 2 KiB of pointers as parameters.
inline constexpr int kLaunchArrays = 256;

// Number of addresses in a ticket of this size.
inline size_t arrays_of_ticket(size_t bytes) {
  return bytes < sizeof(Ticket) ? 0 : (bytes - sizeof(Ticket)) / sizeof(void*);
}

}  // namespace jaxkv::transfer
