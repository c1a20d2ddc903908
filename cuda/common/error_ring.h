// Errors of work on a device: counted where it runs, raised by jaxkv.check_errors().
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/host_device.h"

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

// What check_errors() raises for it.
enum class ErrorKind : int32_t { kPageIndex = 0, kTransfer, kBound };
inline constexpr int kErrorKinds = 3;

JAXKV_HOST_DEVICE constexpr ErrorKind kind_of(ErrorCode code) {
  if (code == ErrorCode::kBoundExceeded) return ErrorKind::kBound;
  return code == ErrorCode::kCopiedBeforeWait || code == ErrorCode::kWaitTimeout
             ? ErrorKind::kTransfer
             : ErrorKind::kPageIndex;
}

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

// A ring for each kind: each has a count of its own, and entries that no other kind overwrites.
struct ErrorRings {
  ErrorRing of_kind[kErrorKinds];

  JAXKV_HOST_DEVICE ErrorRing& of(ErrorCode code) {
    return of_kind[static_cast<int32_t>(kind_of(code))];
  }
};

struct TakenErrors {
  ErrorKind kind;
  int32_t device;                   // its ordinal; kHostChecked for what the host checked
  uint64_t count;                   // errors since the last call
  std::vector<ErrorEntry> details;  // those of them that are still in the ring
};

inline constexpr int32_t kHostChecked = -1;

// Registers rings that a device (or the host) writes; they must live until the process ends.
void register_rings(const volatile ErrorRings* rings, int32_t device);

// What was counted since the last call, for each device and kind that has errors, in the order of
// the kinds. Waits for nothing.
std::vector<TakenErrors> take_errors();

// In the rings of copies that the host checks: the CPU backend's and those of the copy engine.
void record_host_error(ErrorCode fault, int32_t position, int32_t id, int32_t limit);

// A number for the name of a bound: a device cannot record text.
int32_t bound_code(const std::string& name);

std::string describe(const ErrorEntry& entry);

}  // namespace jaxkv
