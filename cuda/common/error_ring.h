// Errors of work on a device: recorded by kernels, raised by jaxkv.check_errors().
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/host_device.h"

namespace jaxkv {

enum class ErrorCode : int32_t {
  kSourceOutOfRange = 0,
  kDestinationOutOfRange,
  kDuplicate,
  // A wait received a copy of a written array: position is the segment, id the array.
  kCopiedBeforeWait,
  // A wait timed out: position is the segment, id the expected counter, limit the last one.
  kWaitTimeout,
  // position is the code of the bound, id the value, limit the bound.
  kBoundExceeded,
  // A block table is too narrow: position is the row, id the column, limit the number of columns.
  kColumnOutOfRange,
};

// The public function whose work recorded an error.
enum class Operation : int32_t {
  kUnknown = 0,
  kLoadPages,
  kStorePages,
  kStartLoad,
  kStartStore,
  kSwapBlocks,
  kStartSwap,
  kSparseFetch,
  kSparseAppend,
  kAlignPreprocess,
  kAlignPostprocess,
};
inline constexpr int32_t kOperations = 11;

struct OperationNames {
  const char *operation, *source_ids, *destination_ids;
};
inline constexpr OperationNames kOperationNames[kOperations] = {
    {"", "", ""},
    {"load_pages", "host_pages", "device_pages"},
    {"store_pages", "device_pages", "host_pages"},
    {"start_load", "host_pages", "device_pages"},
    {"start_store", "device_pages", "host_pages"},
    {"swap_blocks", "src_ids", "dst_ids"},
    {"start_swap", "src_ids", "dst_ids"},
    {"sparse.fetch", "topk_ids", "block_table"},
    {"sparse.append", "positions", "block_table"},
    {"recurrent.align_preprocess", "block_table", "block_table"},
    {"recurrent.align_postprocess", "block_table", "block_table"},
};

// The kind of exception that check_errors() raises.
enum class ErrorKind : int32_t { kPageIndex = 0, kTransfer, kBound };
inline constexpr int kErrorKinds = 3;

JAXKV_HOST_DEVICE constexpr ErrorKind kind_of(ErrorCode code) {
  if (code == ErrorCode::kBoundExceeded) return ErrorKind::kBound;
  return code == ErrorCode::kCopiedBeforeWait || code == ErrorCode::kWaitTimeout
             ? ErrorKind::kTransfer
             : ErrorKind::kPageIndex;
}

// What an entry records, in one word: the code and the operation.
struct Fault {
  int32_t word;

  JAXKV_HOST_DEVICE Fault(ErrorCode code, Operation operation = Operation::kUnknown)
      : word(static_cast<int32_t>(code) | static_cast<int32_t>(operation) << 8) {}
  JAXKV_HOST_DEVICE ErrorCode code() const { return static_cast<ErrorCode>(word & 0xff); }
  JAXKV_HOST_DEVICE Operation operation() const { return static_cast<Operation>(word >> 8); }
};

// Where the errors of a call are counted: a number of the scope's name. Chosen on the host: the
// kernels receive the rings of their scope.
enum class Scope : uint32_t { kDefault = 0 };

inline constexpr size_t kMaxScopes = 256;  // of a process, including the default

struct alignas(16) ErrorEntry {
  // The first 16 bytes are written by one store, so that entries of two writers never mix.
  int32_t fault;     // Fault::word
  int32_t position;  // in the id list
  int32_t id;
  int32_t limit;  // number of blocks on that side
  // Slot number + 1, written last: a reader accepts the entry only if this matches the slot it
  // reads.
  unsigned long long sequence;
};

// Counters only grow, so that neither side resets what the other may be writing.
struct ErrorRing {
  static constexpr int kEntries = 64;
  unsigned long long count;    // slots claimed
  unsigned long long written;  // slots written; equal to count when no write is pending
  ErrorEntry entries[kEntries];
};

// One ring for each kind, with a count of its own and entries that other kinds do not overwrite.
struct ErrorRings {
  ErrorRing of_kind[kErrorKinds];

  JAXKV_HOST_DEVICE ErrorRing& of(ErrorCode code) {
    return of_kind[static_cast<int32_t>(kind_of(code))];
  }
};

struct TakenErrors {
  ErrorKind kind;
  int32_t device;                   // device ordinal, or kHostChecked for checks on the host
  uint64_t count;                   // errors since the previous take_errors()
  std::vector<ErrorEntry> details;  // those that are still in the ring
};

inline constexpr int32_t kHostChecked = -1;

// Registers rings that a device (or the host) writes; they must live until the process ends.
void register_rings(const volatile ErrorRings* rings, int32_t device,
                    Scope scope = Scope::kDefault);

// Errors of a scope counted since the previous call, for each device and kind with errors, ordered
// by kind. Non-blocking.
std::vector<TakenErrors> take_errors(Scope scope = Scope::kDefault);

// Records an error of a copy whose ids the host checks: the CPU backend's and the copy engine's.
void record_host_error(Scope scope, Fault fault, int32_t position, int32_t id, int32_t limit);
// Several of one kind, of which the first ones are known.
void record_host_errors(Scope scope, std::span<const ErrorEntry> first, uint64_t count);

// Numbers of names, for programs and devices, which cannot record text. They are hashes, positive
// and below 2^31: the order in which a process uses its names changes neither its programs nor the
// meaning of the programs in a compilation cache.
//   Throws std::invalid_argument if another name has the same hash, or beyond kMaxScopes.
int32_t bound_code(const std::string& operation, const std::string& bound);
Scope register_scope(const std::string& name);

// Position of a scope among the registered ones, below kMaxScopes. 0, the default scope, for one of
// an executable that another process has serialized.
size_t scope_index(Scope scope);

// The code of an entry, and the names of its operation and argument; empty if unknown.
ErrorCode code_of(const ErrorEntry& entry);
std::string operation_of(const ErrorEntry& entry);
std::string argument_of(const ErrorEntry& entry);

std::string describe(const ErrorEntry& entry);

}  // namespace jaxkv
