// Memory that all ranks of a communicator address, and what they tell each other there.
//
// A rank owns one allocation: a Header, then mailboxes that its peers write. Nothing of XLA's is a
// target of a peer, because XLA moves its buffers. What changes from call to call (epochs, halves,
// stages) lies in that memory and not in arguments of a kernel, so graphs may be replayed.
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
inline constexpr int kMaxBlocks = 512;   // of a call
inline constexpr int kStages = 2;        // of the mailboxes whose data says that it arrived
inline constexpr int kTileBlocks = 128;  // of a call that goes in tiles
inline constexpr int kTileStages = 3;

struct alignas(16) Word {
  uint32_t part[4];
};

// What a word holds until it arrives: NaN in every dtype, so also what a failed call returns.
inline constexpr uint32_t kUnset = 0xFFFFFFFF;

// Epochs and flags are 64 bits wide, and compared by their difference, so a flag that was not
// written for 2^32 barriers is no newer one.
struct Signals {
  uint64_t flags[kMaxBlocks][kMaxRanks];  // the last barrier that this block of a peer came to
  uint64_t calls[2][kMaxRanks];           // the last two calls of each rank, see call_mark()
  uint64_t aborted;                       // 1 + a peer that gave up, or 0
};

// What a rank posts of a call: its number, from 1 on and modulo this, and above that its signature.
inline constexpr uint64_t kCallNumbers = 1 << 12;
inline constexpr uint64_t kSignatures = uint64_t{1} << 52;

JAXKV_HOST_DEVICE inline uint64_t call_mark(uint64_t signature, uint64_t calls_before) {
  return signature * kCallNumbers + (calls_before + 1) % kCallNumbers;
}

// Written by the rank itself, in a call and for the next one.
struct RankProgress {
  uint64_t epoch;      // barriers passed
  uint64_t ll_epochs;  // uses of the quick mailboxes
  uint64_t calls;
  uint32_t entered;  // blocks of the call that have begun
  uint32_t failed;   // a wait gave up: this call and all later ones end at once
};

// Mail follows it: a warp's words must not lie across one more of the lines that links carry.
struct alignas(128) Header {
  Signals signals;
  RankProgress progress;
};

enum class Phase : int32_t { kLowLatency, kBarrier, kScatter, kGather, kAborted, kCall, kMismatch };

// Why a rank gave up; in memory that the host reads.
struct PeerFault {
  uint32_t recorded;  // written last
  int32_t rank, peer;
  Phase phase;
  uint64_t expected, seen;
  uint64_t call = 0, peer_call = 0;  // marks of the last calls that both have posted, 0 for none
};

// Mailboxes of a rank, in words: quick[kStages][world], slot[2][world], and
// tile[kTileBlocks][kTileStages][2][world].
struct Geometry {
  int32_t world;
  uint64_t ll_words, slot_words, tile_words;  // of one box
  uint64_t multicast_words = 0;  // that a switch adds up at once, if there is one to use

  uint64_t all_ll_words() const { return kStages * world * ll_words; }
  uint64_t mail_words() const {
    return all_ll_words() + 2 * world * (slot_words + kTileBlocks * kTileStages * tile_words);
  }
  // Of a rank's part of a two_shot, which scatters to the first half of a quick box and gathers in
  // the second; above that it goes in tiles.
  JAXKV_HOST_DEVICE uint64_t part_words() const { return ll_words / 2; }
};

// What a rank needs to run a call; an argument of kernels.
struct RankView {
  Geometry geometry;
  int32_t rank;
  uint64_t timeout_ns;
  uint64_t stall_ns;           // for tests: threads are late by up to so much
  Header* headers[kMaxRanks];  // each followed by its mail
  Word* staged;                // what a switch adds up: this rank's words
  MulticastWords all_staged;   // and those of all ranks
  PeerFault* fault;
};

// What lets another process address a rank's memory.
using Handle = std::vector<uint8_t>;

template <class T>
using ByRank = std::vector<std::vector<T>>;  // [group][rank]

// A set of groups of `world` ranks each; the ranks of a group add up together. Groups never meet.
//
// The ranks may belong to several processes. Each makes a communicator of the same shape in steps:
// allocate(), once all have done so map() with everybody's handles, and once all have done that,
// calls. In the end unmap(), and once all have done that, the destructor.
class Communicator {
 public:
  struct Rank {
    int32_t device;  // of this process, or -1 for a rank of another one
    RankView view{};
    std::mutex calling;  // the CPU backend may run two calls of a device at once

    bool own() const { return device >= 0; }
    Header* header() const { return view.headers[view.rank]; }
  };

  Communicator(Geometry geometry, const ByRank<int32_t>& devices, uint64_t timeout_ns);
  virtual ~Communicator() = default;

  // These throw std::runtime_error if memory or access to a peer cannot be had; whatever was got
  // goes with the communicator.
  void allocate();
  ByRank<Handle> handles();  // empty for the ranks of other processes
  void map(const ByRank<Handle>& handles);

  // Waits for the work of this process's ranks, then lets go of the memory of other processes.
  virtual void unmap() = 0;
  bool spans_processes() const;  // whether there can be any

  Rank* on_device(int32_t device);
  const Geometry& geometry() const { return geometry_; }

  // The first fault of this process's ranks, once one is recorded. Waits for nothing.
  std::optional<PeerFault> fault() const;

  // For tests, between calls: the ranks of this process have passed `epoch` barriers, and their
  // peers seem to have come `ahead` barriers further, so that with ahead > 0 waits wait for
  // nothing.
  virtual void preset(uint64_t epoch, uint64_t ahead) = 0;

  // For tests, too: threads are late by up to so much, now and then, inside of a call.
  void set_stall(uint64_t nanoseconds);

 protected:
  size_t memory_bytes() const { return sizeof(Header) + geometry_.mail_words() * sizeof(Word); }

  // Memory for a rank of this process, as the rank's device addresses it, and `rank.view.fault`.
  virtual Header* allocate_memory(Rank& rank, const std::vector<int32_t>& peer_devices) = 0;
  virtual Handle handle_of(const Rank& rank) = 0;
  // Memory that a switch adds up, for the ranks of a group, which are all of this process.
  virtual void allocate_multicast(const std::vector<std::unique_ptr<Rank>>& group) = 0;
  // The memory of a rank of another process, as the device of `rank` addresses it.
  virtual Header* map_memory(const Rank& rank, const Handle& handle) = 0;

  template <class Body>
  void for_each_local(Body body) {
    for (auto& group : groups_) {
      for (auto& rank : group) {
        if (rank->own()) body(*rank);
      }
    }
  }

  Geometry geometry_;
  ByRank<std::unique_ptr<Rank>> groups_;
};

inline Word* mail_of(Header* header) { return reinterpret_cast<Word*>(header + 1); }

// The header of a rank as it is after preset(epoch, ahead).
Header header_after(uint64_t epoch, uint64_t ahead);

std::string describe(const PeerFault& fault);
std::string describe_call(uint64_t mark);
// What errors say of calls with this signature.
void name_call(uint64_t signature, std::string description);
const char* name_of(Phase phase);

// With memory for the ranks of this process.
std::shared_ptr<Communicator> make_cpu_communicator(Geometry geometry,
                                                    const ByRank<int32_t>& devices,
                                                    uint64_t timeout_ns);
std::shared_ptr<Communicator> make_cuda_communicator(Geometry geometry,
                                                     const ByRank<int32_t>& devices,
                                                     uint64_t timeout_ns);

// Executables name a communicator by a number above 0 that is never used again.
int64_t register_communicator(std::shared_ptr<Communicator> communicator);
std::shared_ptr<Communicator> find_communicator(int64_t id);  // null once it was closed

// Ends all use of other processes' memory. One that spans processes keeps its own memory, which
// peers may still write to, until free_communicator(). Neither minds an id that is none's.
void close_communicator(int64_t id);
void free_communicator(int64_t id);

// The communicator, unless it was closed or a wait of it gave up.
xla::ffi::ErrorOr<std::shared_ptr<Communicator>> usable_communicator(int64_t id);

}  // namespace jaxkv::collectives
