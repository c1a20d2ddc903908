// What a rank and its peers do for each other in a call: mailboxes, barriers, words that say
// themselves whether they have arrived, waits that end, and the comparison of calls.
// One source for CUDA kernels and for the CPU backend; see all_reduce.h for `Machine`.
#pragma once

#include "collectives/symmetric_memory.h"

namespace jaxkv::collectives {

inline constexpr uint32_t kPollsPerClockRead = 256;  // how often a wait looks at the clock

template <class Machine, int N>
struct Peers {
  const Machine& m;
  const RankView& v;

  JAXKV_DEVICE RankProgress& progress() const { return v.headers[v.rank]->progress; }

  // `at_start` is what all threads read before their block enters, so the last block to enter may
  // say how far this rank is. It enters when it begins: the answer comes while words are on their
  // way.
  JAXKV_DEVICE void enter(RankProgress& at_start) const {
    at_start.entered = m.thread() == 0 ? m.enter(&progress().entered) : kMaxBlocks;
  }
  JAXKV_DEVICE void end(const RankProgress& at_start, uint64_t epochs, uint64_t ll_epochs) const {
    if (at_start.entered != m.num_blocks() - 1) return;
    progress().epoch = at_start.epoch + epochs;
    progress().ll_epochs = at_start.ll_epochs + ll_epochs;
    progress().calls = at_start.calls + 1;
  }

  // ---- Boxes of `owner`, for what `from` sends --------------------------------------------------

  JAXKV_DEVICE Word* mail(int owner) const { return reinterpret_cast<Word*>(v.headers[owner] + 1); }
  JAXKV_DEVICE Word* ll_buffer(int owner, uint64_t ll_epoch, int from) const {
    return mail(owner) + (ll_epoch % kStages * N + from) * v.geometry.ll_words;
  }
  JAXKV_DEVICE Word* slot(int owner, uint64_t epoch, int from) const {
    return mail(owner) + kStages * N * v.geometry.ll_words +
           (epoch % 2 * N + from) * v.geometry.slot_words;
  }
  // Of this block: for words to add up, or for sums. They lie behind all slots.
  JAXKV_DEVICE Word* tile(int owner, uint64_t round, bool sums, int from) const {
    const uint64_t stage = m.block() * kTileStages + round % kTileStages;
    return slot(owner, 0, 2 * N) + ((2 * stage + sums) * N + from) * v.geometry.tile_words;
  }

  // ---- Waiting ----------------------------------------------------------------------------------

  // Until when to wait for `peer`, or 0 to give up; asked now and then while waiting, first with 0.
  // No reference to what the waiting thread has goes in here, or it would lie in memory.
  JAXKV_NOINLINE static uint64_t next_deadline(const Machine& m, const RankView& v,
                                               uint64_t deadline, int peer, Phase phase,
                                               uint64_t expected, uint64_t seen) {
    Header& own = *v.headers[v.rank];
    if (m.peek(&own.progress.failed)) return 0;
    const int other = find_other_call(m, v);
    const uint64_t aborted = m.load_acquire(&own.signals.aborted);
    if (other < 0 && !aborted) {
      const uint64_t now = m.nanoseconds();
      if (!deadline) return now + v.timeout_ns;
      if (now < deadline) return deadline;
    }
    if (other >= 0) {
      record(m, v, {0, v.rank, other, Phase::kMismatch, expected, seen});
    } else if (aborted) {
      const auto culprit = static_cast<int32_t>(aborted - 1);
      record(m, v, {0, v.rank, culprit, Phase::kAborted, expected, seen});
    } else {
      record(m, v, {0, v.rank, peer, phase, expected, seen});
      JAXKV_NO_UNROLL()
      for (int r = 0; r < N; ++r) {
        if (r != v.rank) m.store_release(&v.headers[r]->signals.aborted, uint64_t(v.rank) + 1);
      }
    }
    return 0;
  }

  JAXKV_DEVICE static void record(const Machine& m, const RankView& v, const PeerFault& fault) {
    if (!m.try_claim(&v.headers[v.rank]->progress.failed)) return;  // the first fault says the most
    v.fault->rank = fault.rank;
    v.fault->peer = fault.peer;
    v.fault->phase = fault.phase;
    v.fault->expected = fault.expected;
    v.fault->seen = fault.seen;
    v.fault->call = last_call(m, v, v.rank);
    v.fault->peer_call = last_call(m, v, fault.peer);
    m.store_release(&v.fault->recorded, 1u);
  }

  // Meets the same block of all peers: what they wrote before is here after. False if one did not
  // come.
  JAXKV_DEVICE bool barrier(uint64_t epoch) const {
    arrive(epoch);
    return wait_all(epoch);
  }

  // The two halves of that. The one thread that says so orders what its whole block wrote.
  JAXKV_DEVICE void arrive(uint64_t epoch) const {
    m.sync();
    for (int peer = m.thread(); peer < N; peer += m.num_threads()) {
      m.store_release(&v.headers[peer]->signals.flags[m.block()][v.rank], epoch);
    }
  }
  JAXKV_DEVICE bool wait_all(uint64_t epoch) const {
    bool came = true;
    for (int peer = m.thread(); peer < N; peer += m.num_threads()) {
      const uint64_t* flag = &v.headers[v.rank]->signals.flags[m.block()][peer];
      came &= wait_flag(flag, peer, epoch);
    }
    return m.all(came);
  }

  JAXKV_DEVICE bool wait_flag(const uint64_t* flag, int peer, uint64_t epoch) const {
    uint64_t deadline = 0;
    for (uint32_t polls = 1;; ++polls) {
      const uint64_t seen = m.load_acquire(flag);
      if (static_cast<int64_t>(seen - epoch) >= 0) return true;  // epochs wrap
      if (polls % kPollsPerClockRead == 0) {
        deadline = next_deadline(m, v, deadline, peer, Phase::kBarrier, epoch, seen);
        if (!deadline) return false;
      }
      m.pause();
    }
  }

  // ---- Words that say themselves whether they have arrived --------------------------------------

  JAXKV_DEVICE static bool is_set(const Word& w) {
    return w.part[0] != kUnset && w.part[1] != kUnset && w.part[2] != kUnset && w.part[3] != kUnset;
  }

  // Takes word `at` out of the boxes of all peers for which `due`; false if one did not come, which
  // then is word `seen` of `expected`.
  template <class Due>
  JAXKV_DEVICE bool receive(uint64_t ll_epoch, uint64_t at, Phase phase, uint64_t expected,
                            uint64_t seen, Due due, Word (&from)[N]) const {
    Word* boxes[N];
    JAXKV_UNROLL()
    for (int r = 0; r < N; ++r) boxes[r] = m.keep(ll_buffer(v.rank, ll_epoch, r) + at);
    uint64_t deadline = 0;
    for (uint32_t polls = 1;; ++polls) {
      int missing = -1;
      JAXKV_UNROLL()
      for (int r = 0; r < N; ++r) {
        if (due(r)) from[r] = m.receive(boxes[r]);
      }
      JAXKV_UNROLL()
      for (int r = 0; r < N; ++r) missing = due(r) && !is_set(from[r]) ? r : missing;
      if (missing < 0) break;
      if (polls % kPollsPerClockRead == 0) {
        deadline = next_deadline(m, v, deadline, missing, phase, expected, seen);
        if (!deadline) return false;
      }
      m.pause();
    }
    stall();
    JAXKV_UNROLL()
    for (int r = 0; r < N; ++r) {
      if (due(r)) m.send(boxes[r], {{kUnset, kUnset, kUnset, kUnset}});
    }
    return true;
  }

  // Sends to word `at` of all peers' boxes, each rank to another peer first.
  JAXKV_DEVICE void send(uint64_t ll_epoch, uint64_t at, const Word& word) const {
    JAXKV_UNROLL()
    for (int shift = 1; shift < N; ++shift) {
      m.send(ll_buffer((v.rank + shift) % N, ll_epoch, v.rank) + at, word);
    }
  }

  // ---- Comparison of calls ----------------------------------------------------------------------
  //
  // Ranks that make different calls at once would add up what does not belong together. So each
  // posts the mark of its call to all when it begins, and ends it when it has seen the same mark of
  // all. That needs no order between marks and mail: a mark has the number of its call, and as all
  // calls before were the same on all ranks, what lies in a box of this call was sent in the call
  // of that number. No rank is two calls ahead, because it ends none without the marks of all: so
  // marks of two calls are kept, and none is overwritten before it was read.

  JAXKV_DEVICE static uint64_t* posted(const RankView& v, int owner, int from, uint64_t calls) {
    return &v.headers[owner]->signals.calls[calls % 2][from];
  }
  JAXKV_DEVICE void post(uint64_t mark, uint64_t calls) const {
    for (int peer = m.thread(); m.block() == 0 && peer < N; peer += m.num_threads()) {
      m.post(posted(v, peer, v.rank, calls), mark);
    }
  }
  // One thread asks for each peer.
  JAXKV_DEVICE bool calls_match(uint64_t mark, uint64_t calls) const {
    for (int peer = m.thread(); peer < N; peer += m.num_threads()) {
      uint64_t deadline = 0, seen;
      for (uint32_t polls = 1; (seen = m.peek(posted(v, v.rank, peer, calls))) != mark; ++polls) {
        if (polls % kPollsPerClockRead == 0) {
          deadline = next_deadline(m, v, deadline, peer, Phase::kCall, mark, seen);
          if (!deadline) return false;
        }
        m.pause();
      }
    }
    return true;
  }
  // A peer that has posted another call than this rank, of the same number; -1 if there is none.
  JAXKV_DEVICE static int find_other_call(const Machine& m, const RankView& v) {
    int found = -1;
    JAXKV_NO_UNROLL()
    for (int i = 0; i < 2 * N; ++i) {
      const uint64_t own = m.peek(posted(v, v.rank, v.rank, i));
      const uint64_t other = m.peek(posted(v, v.rank, i / 2, i));
      if (own && other && own != other && (own - other) % kCallNumbers == 0) found = i / 2;
    }
    return found;
  }
  JAXKV_DEVICE static uint64_t last_call(const Machine& m, const RankView& v, int from) {
    const uint64_t a = m.peek(posted(v, v.rank, from, 0)), b = m.peek(posted(v, v.rank, from, 1));
    return (a - b) % kCallNumbers < kCallNumbers / 2 ? a : b;
  }

  // ---- For tests --------------------------------------------------------------------------------

  // Lets a thread be late now and then.
  JAXKV_DEVICE void stall() const {
    if (v.stall_ns) stall(m, v);
  }
  JAXKV_NOINLINE static void stall(const Machine& m, const RankView& v) {
    const uint64_t begin = m.nanoseconds();
    const uint64_t dice = (begin + 977 * v.rank + 31 * m.block()) * 0x9E3779B97F4A7C15;
    if (dice >> 62) return;
    while (m.nanoseconds() - begin < (dice >> 20) % v.stall_ns) m.pause();
  }
};

}  // namespace jaxkv::collectives
