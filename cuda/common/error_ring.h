// Ids that were refused: counted where the copy runs, raised by jaxkv.check_errors().
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace jaxkv {

enum class ErrorCode : int32_t {
  kSourceOutOfRange = 0,
  kDestinationOutOfRange,
  kDuplicate,
  kCopiedBeforeWait,  // a wait got a copy of a written array: position is the segment, id the array
  kWaitTimeout,    // a wait gave up: position is the segment, id the number wanted, limit the one
                   // seen
  kBoundExceeded,  // position is the code of the bound, id the value, limit the bound
  kColumnOutOfRange,  // of a block table: position is the row, id the column, limit its columns
};

struct alignas(16) ErrorEntry {
  // The first 16 bytes are written by one store, so that two writers never mix theirs.
  ErrorCode fault;
  int32_t position;  // in the id list
  int32_t id;
  int32_t limit;  // blocks on that side
  // Slot number + 1, written last: a reader trusts the entry only if it is the slot it asked for.
  unsigned long long sequence;
};

// Only ever grows, so that neither side has to reset what the other may be writing.
struct ErrorRing {
  static constexpr int kEntries = 64;
  unsigned long long count;    // slots claimed
  unsigned long long written;  // slots written; equal to count once no writer is left
  ErrorEntry entries[kEntries];
};

struct TakenErrors {
  uint64_t count = 0;               // skipped entries since the last call
  std::vector<ErrorEntry> details;  // the first of them that are still in the ring
};

// Registers a ring that a device (or the host) writes; it must live until the process ends.
void register_ring(const volatile ErrorRing* ring);

// What was counted since the last call, over all rings. Waits for nothing.
TakenErrors take_errors();

// The ring of copies that the host checks: the CPU backend's and those of the copy engine.
void record_host_error(ErrorCode fault, int32_t position, int32_t id, int32_t limit);

// A number for the name of a bound: a device cannot record text.
int32_t bound_code(const std::string& name);

std::string describe(const ErrorEntry& entry);

}  // namespace jaxkv
