// Symmetric memory: one workspace for each rank, mapped by all ranks of a communicator, and the
// flags and counters in it.
//
// A workspace is a Header followed by receive buffers, which the peers write. Peers never write to
// buffers of XLA, because XLA moves its buffers. All state that changes from call to call (epochs,
// halves, stages) is in this memory and not in kernel arguments, so CUDA graphs can be replayed.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "collectives/multicast.h"
#include "common/host_device.h"
#include "xla/ffi/api/ffi.h"

namespace jaxkv::collectives {

inline constexpr int kMaxRanks = 8;
inline constexpr int kMaxBlocks = 512;   // per call
inline constexpr int kRoutes = 5;        // of Route
inline constexpr int kStages = 2;        // of the LL buffers
inline constexpr int kTileBlocks = 128;  // per call, two_shot in tiles
inline constexpr int kTileStages = 3;
inline constexpr uint64_t kFirstCallTimeouts = 10;  // if there are several processes

struct alignas(16) Word {
  uint32_t part[4];
};

// Sentinel of a word that has not arrived: NaN in every dtype, and therefore also the output of a
// failed call.
inline constexpr uint32_t kUnset = 0xFFFFFFFF;

// Epochs and flags are 64 bits wide and are compared by their difference, so that a flag that was
// not written for 2^32 barriers does not compare as newer.
struct Signals {
  uint64_t flags[kMaxBlocks][kMaxRanks];  // last barrier at which this block of a peer arrived
  uint64_t calls[2][kMaxRanks];           // the last two calls of each rank, see call_mark()
  uint64_t aborted;                       // 1 + rank of a peer that timed out, or 0
  uint64_t waits[kMaxRanks][kMaxRanks];   // [rank][peer]: 1 if a wait of rank for peer has failed
};

// Mark of a call: its signature * kCallNumbers + its number, counted from 1 and modulo
// kCallNumbers.
inline constexpr uint64_t kCallNumbers = 1 << 12;
inline constexpr uint64_t kSignatures = uint64_t{1} << 52;

JAXKV_HOST_DEVICE inline uint64_t call_mark(uint64_t signature, uint64_t calls_before) {
  return signature * kCallNumbers + (calls_before + 1) % kCallNumbers;
}

// Written by the rank itself during a call, and read in the next one.
struct RankProgress {
  uint64_t epoch;      // barriers passed
  uint64_t ll_epochs;  // uses of the LL buffers
  uint64_t calls;
  uint32_t entered;   // blocks of the current call that have begun
  uint32_t failed;    // a wait timed out: this call and all later ones end immediately
  uint64_t reporter;  // 1 + the block that completes the record of the fault, or 0
};

// The receive buffers follow. Alignment: the words of a warp must not straddle an additional
// 128-byte line on the link.
struct alignas(128) Header {
  Signals signals;
  RankProgress progress;
};

enum class Phase : int32_t { kLowLatency, kBarrier, kScatter, kGather, kAborted, kCall, kMismatch };

// The first fault of a rank, in memory that the host reads.
struct PeerFault {
  uint32_t recorded;  // written last
  int32_t rank, peer;
  Phase phase;
  uint64_t expected, seen;
  int32_t timed_out;                 // the rank whose timeout ended the wait; often this one
  uint64_t call = 0, peer_call = 0;  // marks of the last calls posted by both, 0 for none
};

// Receive buffers of a rank, in words: ll_buffer[kStages][world_size], slot[2][world_size], and
// tile[kTileBlocks][kTileStages][2][world_size].
struct Geometry {
  int32_t world_size;
  uint64_t ll_words, slot_words, tile_words;  // size of one buffer
  uint64_t multicast_words = 0;  // size of the multicast workspace, 0 without multicast

  uint64_t all_ll_words() const { return kStages * world_size * ll_words; }
  uint64_t receive_words() const {
    return all_ll_words() + 2 * world_size * (slot_words + kTileBlocks * kTileStages * tile_words);
  }
  // Size of a part of two_shot, which scatters to the first half of an LL buffer and gathers in the
  // second half. Messages with larger parts are split into tiles.
  JAXKV_HOST_DEVICE uint64_t part_words() const { return ll_words / 2; }
};

// Kernel argument: the view that a rank has of its communicator.
struct RankView {
  Geometry geometry;
  int32_t rank;
  uint64_t timeout_ns, first_timeout_ns;  // the latter applies to the first call
#ifdef JAXKV_TEST_HOOKS
  uint64_t stall_ns;  // maximum random delay of threads
#endif
  Header* headers[kMaxRanks];       // each followed by the receive buffers
  Word* staged;                     // multicast workspace: this rank's words
  MulticastWords multicast_staged;  // multicast address of the words of all ranks
  PeerFault* fault;
};

// Handle by which another process maps a rank's memory.
using Handle = std::vector<uint8_t>;

template <class T>
using ByRank = std::vector<std::vector<T>>;  // [group][rank]

// Upper limits on the thread blocks of a call, by Route.
using BlockLimits = std::vector<int32_t>;

// A set of groups of `world_size` ranks each; ranks are reduced within their group.
//
// The ranks may belong to several processes. Each process creates a communicator of the same shape
// in steps: allocate(); once all processes have done so, map() with the handles of all; once all
// have done that, calls. At the end unmap(), and once all have done that, the destructor.
class Communicator {
 public:
  struct Rank {
    int32_t device;  // ordinal in this process, or -1 for a rank of another process
    RankView view{};
    std::mutex calling;  // the CPU backend may run two calls of a device concurrently

    bool own() const { return device >= 0; }
    Header* header() const { return view.headers[view.rank]; }
  };

  Communicator(Geometry geometry, const ByRank<int32_t>& devices, uint64_t timeout_ns);
  virtual ~Communicator() = default;

  // These throw std::runtime_error if allocation or peer access fails; what has been allocated is
  // released with the communicator.
  void allocate();
  ByRank<Handle> handles();  // empty for the ranks of other processes
  void map(const ByRank<Handle>& handles);

  // Waits for the work of this process's ranks, then unmaps the memory of other processes.
  virtual void unmap() = 0;
  bool spans_processes() const;  // whether a group has ranks of this and of other processes

  Rank* on_device(int32_t device);
  const Geometry& geometry() const { return geometry_; }

  // Limits of this process until limit_blocks() has been called with those of all: block b of a
  // rank waits for block b of its peers, so all ranks must launch equal numbers.
  const BlockLimits& block_limits() const { return block_limits_; }
  void limit_blocks(const BlockLimits& limits);  // keeps the smaller of each; before any call

  // The first fault that a rank of this process has recorded, if any. Non-blocking.
  std::optional<PeerFault> fault() const;

  // Writes this header to the ranks of this process, and `ll_value` to all 32-bit parts of their LL
  // buffers. Not concurrent with calls.
  virtual void initialize(const Header& header, uint32_t ll_value) = 0;

  template <class Body>
  void for_each_local(Body body) {
    for (auto& group : groups_) {
      for (auto& rank : group) {
        if (rank->own()) body(*rank);
      }
    }
  }

 protected:
  size_t memory_bytes() const { return sizeof(Header) + geometry_.receive_words() * sizeof(Word); }

  // Allocates memory for a rank of this process, as addressed by its device, and `rank.view.fault`.
  virtual Header* allocate_memory(Rank& rank, const std::vector<int32_t>& peer_devices) = 0;
  virtual Handle handle_of(const Rank& rank) = 0;
  // Allocates the multicast workspaces of a group, whose ranks all belong to this process.
  virtual void allocate_multicast(const std::vector<std::unique_ptr<Rank>>& group) = 0;
  // Maps the memory of a rank of another process for the device of `rank`.
  virtual Header* map_memory(const Rank& rank, const Handle& handle) = 0;

  Geometry geometry_;
  BlockLimits block_limits_ = BlockLimits(kRoutes, kMaxBlocks);
  ByRank<std::unique_ptr<Rank>> groups_;
};

inline Word* receive_buffers_of(Header* header) { return reinterpret_cast<Word*>(header + 1); }

std::string describe(const PeerFault& fault);
std::string describe_call(uint64_t mark);
// Registers the description of calls with this signature, for error messages.
void name_call(uint64_t signature, std::string description);
const char* name_of(Phase phase);

// Communicators with memory allocated for the ranks of this process.
std::shared_ptr<Communicator> make_cpu_communicator(Geometry geometry,
                                                    const ByRank<int32_t>& devices,
                                                    uint64_t timeout_ns);
std::shared_ptr<Communicator> make_cuda_communicator(Geometry geometry,
                                                     const ByRank<int32_t>& devices,
                                                     uint64_t timeout_ns);

// Executables refer to a communicator by an id above 0 that is never reused.
int64_t register_communicator(std::shared_ptr<Communicator> communicator);
std::shared_ptr<Communicator> find_communicator(int64_t id);  // null after it was closed

// Ends all use of other processes' memory, except by CUDA graphs that are launched concurrently,
// which the caller must exclude. A communicator that spans processes keeps its own
// memory, to which peers may still write, until free_communicator(). Both ignore unknown ids.
void close_communicator(int64_t id);
void free_communicator(int64_t id);

// The communicator, or an error if it was closed or one of its waits timed out.
xla::ffi::ErrorOr<std::shared_ptr<Communicator>> usable_communicator(int64_t id);

}  // namespace jaxkv::collectives
