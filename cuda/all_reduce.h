// An all-reduce as one rank runs it: one source for blocks of a CUDA kernel and for the CPU
// backend.
//
// `Machine` says which of a rank's threads this is (block, num_blocks, thread, num_threads) and how
// it reads and writes memory that peers share. `Element` adds up the values of a word in f32.
// Ranks are always added in the order of their numbers, so results are equal bit for bit.
//
// Why a peer never overwrites what is still read: it writes a half of the scatter and gather boxes
// two turns later, having passed the last barrier of the turn between, to which this rank came
// after reading. A word lies with the same block in all rounds of a call, and a new call begins
// when all blocks of the call before have ended. The stages of the quick boxes follow the same
// rule, where data takes the place of barriers: what is cleared now was read one call ago, and
// written next by peers that have seen this rank's next call.
#pragma once

#include "symmetric_memory.h"

#ifdef __CUDACC__
#define JAXKV_DEVICE __device__ __forceinline__
#define JAXKV_RARE __device__ __noinline__
#define JAXKV_UNROLL(times) _Pragma(JAXKV_TEXT(unroll times))
#define JAXKV_TEXT(text) #text
#else
#define JAXKV_DEVICE inline
#define JAXKV_RARE inline
#define JAXKV_UNROLL(times)
#endif

namespace jaxkv {

enum class Algorithm : int64_t { kLowLatency, kOneShot, kTwoShot };

// `bytes` of whole elements at any address that is aligned for one.
struct Message {
  const char* in;
  char* out;
  uint64_t bytes;
  Algorithm algorithm;
};

inline constexpr uint32_t kPollsPerLook = 256;  // how often a wait looks at the clock

template <class Machine, class Element, int N>
struct Call {
  const Machine& m;
  const RankView& v;
  const Message& message;

  // True if the sum is in `out`, false if a wait gave up.
  JAXKV_DEVICE bool run() {
    const Progress at_start = progress();
    // All threads of the block decide alike, although another block may give up meanwhile.
    if (m.all(!at_start.broken) && reduced(at_start)) return true;
    for (uint64_t i = first(); i < words(); i += step()) {
      store_output(i, {{kAbsent, kAbsent, kAbsent, kAbsent}});  // rather NaN than a wrong sum
    }
    return false;
  }

 private:
  using Bits = typename Element::Bits;

  JAXKV_DEVICE Progress& progress() const { return v.headers[v.rank]->progress; }
  JAXKV_DEVICE uint64_t words() const { return (message.bytes + sizeof(Word) - 1) / sizeof(Word); }
  JAXKV_DEVICE uint64_t first() const { return m.block() * m.num_threads() + m.thread(); }
  JAXKV_DEVICE uint64_t step() const { return m.num_blocks() * m.num_threads(); }

  JAXKV_DEVICE bool reduced(const Progress& at_start) {
    switch (message.algorithm) {
      case Algorithm::kLowLatency:
        return low_latency(at_start);
      case Algorithm::kOneShot:
        return one_shot(at_start);
      case Algorithm::kTwoShot:
        return two_shot(at_start);
    }
    return false;
  }

  // ---- Boxes of `owner`, for what `from` sends --------------------------------------------------

  JAXKV_DEVICE Word* mail(int owner) const { return reinterpret_cast<Word*>(v.headers[owner] + 1); }
  JAXKV_DEVICE Word* quick(int owner, uint32_t stage, int from) const {
    return mail(owner) + (stage * N + from) * v.geometry.quick_words;
  }
  JAXKV_DEVICE Word* scatter(int owner, uint64_t turn, int from) const {
    return mail(owner) + kStages * N * v.geometry.quick_words +
           ((turn % 2) * N + from) * v.geometry.slot_words;
  }
  JAXKV_DEVICE Word* gather(int owner, uint64_t turn, int from) const {
    return scatter(owner, turn, from) + 2 * N * v.geometry.slot_words;
  }

  // ---- Words of the operand and of the result ---------------------------------------------------

  JAXKV_DEVICE bool whole(uint64_t i) const {
    const auto addresses =
        reinterpret_cast<uintptr_t>(message.in) | reinterpret_cast<uintptr_t>(message.out);
    return addresses % sizeof(Word) == 0 && (i + 1) * sizeof(Word) <= message.bytes;
  }
  JAXKV_DEVICE Word load_input(uint64_t i) const {
    return whole(i) ? m.load(reinterpret_cast<const Word*>(message.in) + i)
                    : load_values(message, i);
  }
  JAXKV_DEVICE void store_output(uint64_t i, const Word& word) const {
    if (whole(i)) return m.store(reinterpret_cast<Word*>(message.out) + i, word);
    store_values(message, i, word.part[0], word.part[1], word.part[2], word.part[3]);
  }
  // Value by value, where a word is cut off or no address of a word; rare, so not inlined.
  JAXKV_RARE static Word load_values(const Message& message, uint64_t i) {
    Word word{};
    const auto* in = reinterpret_cast<const Bits*>(message.in);
    for (uint64_t k = i * Element::kLanes; k < end_of(message, i); ++k) {
      word.part[part_of(k)] |= uint32_t{in[k]} << shift_of(k);
    }
    return word;
  }
  JAXKV_RARE static void store_values(const Message& message, uint64_t i, uint32_t p0, uint32_t p1,
                                      uint32_t p2, uint32_t p3) {
    const Word word{{p0, p1, p2, p3}};
    auto* out = reinterpret_cast<Bits*>(message.out);
    for (uint64_t k = i * Element::kLanes; k < end_of(message, i); ++k) {
      out[k] = static_cast<Bits>(word.part[part_of(k)] >> shift_of(k));
    }
  }
  JAXKV_DEVICE static uint64_t end_of(const Message& message, uint64_t i) {
    const uint64_t end = (i + 1) * Element::kLanes, all = message.bytes / sizeof(Bits);
    return end < all ? end : all;
  }
  // Where value k of the operand lies in its word.
  JAXKV_DEVICE static int part_of(uint64_t k) { return k % Element::kLanes * sizeof(Bits) / 4; }
  JAXKV_DEVICE static int shift_of(uint64_t k) { return k * sizeof(Bits) % 4 * 8; }

  JAXKV_DEVICE static Word sum(const Word (&from)[N]) {
    float lanes[Element::kLanes];
    JAXKV_UNROLL()
    for (int k = 0; k < Element::kLanes; ++k) lanes[k] = Element::lane(from[0], k);
    JAXKV_UNROLL()
    for (int r = 1; r < N; ++r) {
      JAXKV_UNROLL()
      for (int k = 0; k < Element::kLanes; ++k) lanes[k] += Element::lane(from[r], k);
    }
    return Element::word(lanes);
  }

  // ---- Waiting ----------------------------------------------------------------------------------

  // Whether to give up on `peer`; asked now and then while waiting. The first time sets `deadline`.
  JAXKV_RARE static bool gives_up(const Machine& m, const RankView& v, uint64_t& deadline,
                                  const PeerFault& wait) {
    Header& own = *v.headers[v.rank];
    if (m.peek(&own.progress.broken)) return true;
    if (const uint64_t aborted = m.load_acquire(&own.signals.aborted)) {
      PeerFault told = wait;
      told.peer = static_cast<int32_t>(aborted - 1);
      told.phase = Phase::kAborted;
      record(m, v, told);
      return true;
    }
    const uint64_t now = m.nanoseconds();
    if (!deadline) deadline = now + v.timeout_ns;
    if (now < deadline) return false;
    record(m, v, wait);
    for (int r = 0; r < N; ++r) {
      if (r != v.rank) m.store_release(&v.headers[r]->signals.aborted, uint64_t(v.rank) + 1);
    }
    return true;
  }

  JAXKV_DEVICE static void record(const Machine& m, const RankView& v, const PeerFault& fault) {
    if (!m.claim(&v.headers[v.rank]->progress.broken)) return;  // the first fault says the most
    v.fault->rank = fault.rank;
    v.fault->peer = fault.peer;
    v.fault->phase = fault.phase;
    v.fault->expected = fault.expected;
    v.fault->seen = fault.seen;
    m.store_release(&v.fault->recorded, 1u);
  }

  // Meets the same block of all peers: what they wrote before is here after. False if one did not
  // come.
  JAXKV_DEVICE bool meet(uint64_t epoch, Phase phase) const {
    m.publish();
    m.sync();
    for (int peer = m.thread(); peer < N; peer += m.num_threads()) {
      m.store_release(&v.headers[peer]->signals.flags[m.block()][v.rank], epoch);
    }
    bool came = true;
    for (int peer = m.thread(); peer < N; peer += m.num_threads()) {
      const uint64_t* flag = &v.headers[v.rank]->signals.flags[m.block()][peer];
      came &= comes(flag, peer, epoch, phase);
    }
    return m.all(came);
  }

  JAXKV_DEVICE bool comes(const uint64_t* flag, int peer, uint64_t epoch, Phase phase) const {
    uint64_t deadline = 0;
    for (uint32_t polls = 1;; ++polls) {
      const uint64_t seen = m.load_acquire(flag);
      if (static_cast<int64_t>(seen - epoch) >= 0) return true;  // epochs wrap
      if (polls % kPollsPerLook == 0 &&
          gives_up(m, v, deadline, {0, v.rank, peer, phase, epoch, seen})) {
        return false;
      }
      m.pause();
    }
  }

  // Whether this is the last thread of the call, which alone may change Progress.
  JAXKV_DEVICE bool is_last() const {
    m.sync();
    return m.thread() == 0 && m.last_block(&progress().arrived);
  }

  // ---- Algorithms -------------------------------------------------------------------------------

  JAXKV_DEVICE static bool arrived(const Word& w) {
    return w.part[0] != kAbsent && w.part[1] != kAbsent && w.part[2] != kAbsent &&
           w.part[3] != kAbsent;
  }

  // Every rank sends everything to all, and each word says itself whether it has arrived.
  JAXKV_DEVICE bool low_latency(const Progress& at_start) {
    const uint32_t stage = at_start.stage, before = (stage + kStages - 1) % kStages;
    uint64_t dirty = 0;  // no index at run time, which would keep `at_start` out of registers
    JAXKV_UNROLL()
    for (uint32_t s = 0; s < kStages; ++s) dirty = s == before ? at_start.dirty_words[s] : dirty;
    for (uint64_t i = first(); i < words(); i += step()) {
      Word word = load_input(i);
      JAXKV_UNROLL()
      for (uint32_t& part : word.part) part = part == kAbsent ? Element::kOtherNan : part;
      JAXKV_UNROLL()
      for (int r = 0; r < N; ++r) m.send(quick(r, stage, v.rank) + i, word);
    }
    for (int r = 0; r < N; ++r) {
      for (uint64_t i = first(); i < dirty; i += step()) {
        m.send(quick(v.rank, before, r) + i, {{kAbsent, kAbsent, kAbsent, kAbsent}});
      }
    }
    bool came = true;
    for (uint64_t i = first(); came && i < words(); i += step()) {
      Word from[N];
      came = receive(stage, i, from);
      if (came) store_output(i, sum(from));
    }
    if (!m.all(came)) return false;
    if (is_last()) {
      progress().dirty_words[before] = 0;
      progress().dirty_words[stage] = words();
      progress().stage = (stage + 1) % kStages;
    }
    return true;
  }

  JAXKV_DEVICE bool receive(uint32_t stage, uint64_t i, Word (&from)[N]) const {
    uint64_t deadline = 0;
    for (uint32_t polls = 1;; ++polls) {
      int missing = -1;
      JAXKV_UNROLL()
      for (int r = 0; r < N; ++r) from[r] = m.receive(quick(v.rank, stage, r) + i);
      JAXKV_UNROLL()
      for (int r = 0; r < N; ++r) missing = arrived(from[r]) ? missing : r;
      if (missing < 0) return true;
      if (polls % kPollsPerLook == 0 &&
          gives_up(m, v, deadline, {0, v.rank, missing, Phase::kQuick, words(), i})) {
        return false;
      }
      m.pause();
    }
  }

  // Every rank sends everything to all, and adds up when all have met.
  JAXKV_DEVICE bool one_shot(const Progress& at_start) {
    const uint64_t epoch = at_start.epoch, turn = at_start.turns;
    for (uint64_t i = first(); i < words(); i += step()) {
      const Word word = load_input(i);
      JAXKV_UNROLL()
      for (int r = 0; r < N; ++r) {
        if (r != v.rank) m.store(scatter(r, turn, v.rank) + i, word);
      }
    }
    if (!meet(epoch + 1, Phase::kScatter)) return false;
    for (uint64_t i = first(); i < words(); i += step()) store_output(i, sum_of(turn, i, i));
    if (is_last()) {
      progress().epoch = epoch + 1;
      progress().turns = turn + 1;
    }
    return true;
  }

  // The sum of word `at` of all boxes, where this rank's own word is number `mine` of its operand.
  JAXKV_DEVICE Word sum_of(uint64_t turn, uint64_t at, uint64_t mine) const {
    const Word own = load_input(mine);
    Word from[N];
    JAXKV_UNROLL()
    for (int r = 0; r < N; ++r) {
      from[r] = r == v.rank ? own : m.load_mail(scatter(v.rank, turn, r) + at);
    }
    return sum(from);
  }

  // Each rank adds up one part and sends the sum to all, in as many rounds as the boxes need.
  JAXKV_DEVICE bool two_shot(const Progress& at_start) {
    const uint64_t epoch = at_start.epoch, turn = at_start.turns;
    const uint64_t per_round = N * v.geometry.slot_words;
    const uint64_t rounds = (words() + per_round - 1) / per_round;
    const uint64_t part = (words() + rounds * N - 1) / (rounds * N);
    for (uint64_t round = 0; round < rounds; ++round) {
      if (!two_shot_round(round * N * part, part, turn + round, epoch + 2 * round)) return false;
    }
    if (is_last()) {
      progress().epoch = epoch + 2 * rounds;
      progress().turns = turn + rounds;
    }
    return true;
  }

  JAXKV_DEVICE bool two_shot_round(uint64_t base, uint64_t part, uint64_t turn, uint64_t epoch) {
    auto begin = [&](int r) { return base + r * part; };
    auto count = [&](int r) {  // of the words of rank r's part, of which the last are cut off
      const uint64_t left = begin(r) < words() ? words() - begin(r) : 0;
      return left < part ? left : part;
    };
    for (int shift = 1; shift < N; ++shift) {  // all ranks begin with another peer
      const int r = (v.rank + shift) % N;
      const uint64_t end = count(r);
      JAXKV_UNROLL(4)
      for (uint64_t i = first(); i < end; i += step()) {
        m.store(scatter(r, turn, v.rank) + i, load_input(begin(r) + i));
      }
    }
    if (!meet(epoch + 1, Phase::kScatter)) return false;
    const uint64_t mine = count(v.rank);
    JAXKV_UNROLL(2)
    for (uint64_t i = first(); i < mine; i += step()) {
      const Word word = sum_of(turn, i, begin(v.rank) + i);
      store_output(begin(v.rank) + i, word);
      JAXKV_UNROLL()
      for (int r = 0; r < N; ++r) {
        if (r != v.rank) m.store(gather(r, turn, v.rank) + i, word);
      }
    }
    if (!meet(epoch + 2, Phase::kGather)) return false;
    for (int shift = 1; shift < N; ++shift) {
      const int r = (v.rank + shift) % N;
      const uint64_t end = count(r);
      JAXKV_UNROLL(4)
      for (uint64_t i = first(); i < end; i += step()) {
        store_output(begin(r) + i, m.load_mail(gather(v.rank, turn, r) + i));
      }
    }
    return true;
  }
};

// What a handler was asked for, once it is known to fit.
struct Task {
  std::shared_ptr<Communicator> communicator;
  Communicator::Rank* rank;
  Message message;
  xla::ffi::DataType dtype;
};
xla::ffi::ErrorOr<Task> resolve_task(int32_t device, xla::ffi::AnyBuffer in,
                                     xla::ffi::Result<xla::ffi::AnyBuffer> out,
                                     int64_t communicator, int64_t algorithm);

// Loads every kernel on a CUDA device: the first call must not, beside a peer that waits.
void load_all_reduce(int32_t device);

// Runs `body.template operator()<N>()` for the number of ranks.
template <class Body>
auto with_world(int world, Body body) {
  switch (world) {
    case 2:
      return body.template operator()<2>();
    case 4:
      return body.template operator()<4>();
    case 6:
      return body.template operator()<6>();
    default:
      return body.template operator()<8>();
  }
}

}  // namespace jaxkv
