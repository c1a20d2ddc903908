// Communication of a rank with its peers in a call: receive buffers, barriers, words that signal
// their own arrival, waits with a timeout, and the check that all ranks made the same call. One
// source for CUDA kernels and for the CPU backend; see all_reduce.h for `Machine`.
#pragma once

#include "collectives/stall.h"
#include "collectives/symmetric_memory.h"

namespace jaxkv::collectives {

// How long a rank whose call has failed waits for the others to report whom they wait for.
inline constexpr uint64_t kAnswerLimitNs = 1'000'000'000;

template <class Machine, int N>
struct Peers {
  const Machine& m;
  const RankView& v;

  JAXKV_DEVICE RankProgress& progress() const { return v.headers[v.rank]->progress; }

  // All threads read `at_start` before their block enters, so the last block to enter may update
  // the progress. Blocks enter at the beginning of the call, to overlap the atomic with the words
  // in flight.
  JAXKV_DEVICE void enter(RankProgress& at_start) const {
    at_start.entered = m.thread() == 0 ? m.enter(&progress().entered) : kMaxBlocks;
  }
  JAXKV_DEVICE void end(const RankProgress& at_start, uint64_t epochs, uint64_t ll_epochs) const {
    if (at_start.entered != m.num_blocks() - 1) return;
    progress().epoch = at_start.epoch + epochs;
    progress().ll_epochs = at_start.ll_epochs + ll_epochs;
    progress().calls = at_start.calls + 1;
  }

  // ---- Receive buffers of `owner` for data sent by `from` ---------------------------------------

  JAXKV_DEVICE Word* receive_buffers(int owner) const {
    return reinterpret_cast<Word*>(v.headers[owner] + 1);
  }
  JAXKV_DEVICE Word* ll_buffer(int owner, uint64_t ll_epoch, int from) const {
    return receive_buffers(owner) + (ll_epoch % kStages * N + from) * v.geometry.ll_words;
  }
  JAXKV_DEVICE Word* slot(int owner, uint64_t epoch, int from) const {
    return receive_buffers(owner) + kStages * N * v.geometry.ll_words +
           (epoch % 2 * N + from) * v.geometry.slot_words;
  }
  // Tile buffers of this block, for operands or for sums; located after all slot buffers.
  JAXKV_DEVICE Word* tile(int owner, uint64_t round, bool sums, int from) const {
    const uint64_t stage = m.block() * kTileStages + round % kTileStages;
    return slot(owner, 0, 2 * N) + ((2 * stage + sums) * N + from) * v.geometry.tile_words;
  }

  // ---- Waiting ----------------------------------------------------------------------------------

  // Deadline of the wait for `peer`, or 0 to abort the wait. Called periodically while waiting, at
  // first with deadline 0. Takes no reference to state of the waiting thread, which would force
  // that state into local memory; for the same reason everything that can be left to report() is.
  JAXKV_NOINLINE static uint64_t next_deadline(const Machine& m, const RankView& v,
                                               uint64_t deadline, int peer, Phase phase,
                                               uint64_t expected, uint64_t seen) {
    Header& own = *v.headers[v.rank];
    const int other = find_mismatch(m, v);
    const uint64_t aborted = m.load_acquire(&own.signals.aborted);
    if (other < 0 && !aborted && !m.peek(&own.progress.failed)) {
      const uint64_t now = m.nanoseconds();
      if (!deadline) return now + (own.progress.calls ? v.timeout_ns : v.first_timeout_ns);
      if (now < deadline) return deadline;
    }
    if (other >= 0) {
      claim(m, v, {0, v.rank, other, Phase::kMismatch, expected, seen, v.rank});
    } else {
      const auto first = static_cast<int32_t>(aborted - 1);
      claim(m, v,
            {0, v.rank, peer, aborted ? Phase::kAborted : phase, expected, seen,
             aborted ? first : v.rank});
      publish_wait(m, v, peer, !aborted);
    }
    return 0;
  }

  // Only the first fault of a rank is recorded; its block completes the record in report().
  JAXKV_DEVICE static void claim(const Machine& m, const RankView& v, const PeerFault& fault) {
    RankProgress& progress = v.headers[v.rank]->progress;
    if (!m.try_claim(&progress.failed)) return;
    v.fault->rank = fault.rank;
    v.fault->peer = fault.peer;
    v.fault->phase = fault.phase;
    v.fault->expected = fault.expected;
    v.fault->seen = fault.seen;
    v.fault->timed_out = fault.timed_out;
    progress.reporter = m.block() + 1;
  }
  // The peer that a thread waits for may itself be waiting for the rank that is missing. So the
  // first rank that times out ends the waits of all, and all tell all others whom they wait for. No
  // call on this memory can succeed any more, so this state is never reset.
  JAXKV_DEVICE static void publish_wait(const Machine& m, const RankView& v, int peer,
                                        bool is_first) {
    if (m.peek(&v.headers[v.rank]->signals.waits[v.rank][peer])) return;  // this store is the last
    JAXKV_NO_UNROLL()
    for (int shift = 1; shift <= N; ++shift) {
      Signals& signals = v.headers[(v.rank + shift) % N]->signals;
      m.store_release(&signals.waits[v.rank][peer], uint64_t{1});
      if (is_first && shift < N) m.store_release(&signals.aborted, uint64_t(v.rank) + 1);
    }
  }

  // At the end of a failed call, after all threads of the block have ended their waits.
  JAXKV_NOINLINE static void report(const Machine& m, const RankView& v) {
    RankProgress& progress = v.headers[v.rank]->progress;
    if (m.thread() != 0 || m.peek(&progress.reporter) != m.block() + 1) return;
    PeerFault& fault = *v.fault;
    if (fault.phase != Phase::kMismatch) {
      const int absent = find_absent(m, v, fault.peer);
      if (absent >= 0) fault.peer = absent;
      if (absent < 0 && fault.phase == Phase::kAborted) fault.peer = fault.timed_out;
    }
    fault.call = last_call(m, v, v.rank);
    fault.peer_call = last_call(m, v, fault.peer);
    progress.reporter = 0;
    m.store_release(&fault.recorded, 1u);
  }
  // The rank that this rank waits for, directly or through others, and that waits for none; -1 if
  // there is none. Gives the others time to answer, unless all but one have.
  JAXKV_DEVICE static int find_absent(const Machine& m, const RankView& v, int peer) {
    const uint64_t begin = m.nanoseconds();
    uint32_t waiting, awaited;
    do {
      m.pause();
      waiting = 0, awaited = 1u << v.rank;
      JAXKV_NO_UNROLL()
      for (int i = 0; i < N * N * N; ++i) {  // N passes
        const int from = i / N % N, to = i % N;
        if (!m.load_acquire(&v.headers[v.rank]->signals.waits[from][to])) continue;
        waiting |= 1u << from;
        if (awaited >> from & 1) awaited |= 1u << to;
      }
      const uint32_t silent = ~waiting & ((1u << N) - 1);
      if ((silent & (silent - 1)) == 0) {  // one at most
        awaited = silent;
        break;
      }
    } while (m.nanoseconds() - begin < kAnswerLimitNs);
    awaited &= ~waiting;
    if (awaited >> peer & 1) return peer;
    for (int r = 0; r < N; ++r) {
      if (awaited >> r & 1) return r;
    }
    return -1;
  }

  // Barrier with the blocks of the same index of all peers: their earlier writes are visible
  // afterwards. False if a peer did not arrive before the timeout.
  JAXKV_DEVICE bool barrier(uint64_t epoch) const {
    arrive(epoch);
    return wait_all(epoch);
  }

  // The two halves of the barrier. sync() orders the writes of the entire block before the release
  // store of each signaling thread.
  JAXKV_DEVICE void arrive(uint64_t epoch) const {
    m.sync();
    for (int peer = m.thread(); peer < N; peer += m.num_threads()) {
      m.store_release(&v.headers[peer]->signals.flags[m.block()][v.rank], epoch);
    }
  }
  JAXKV_DEVICE bool wait_all(uint64_t epoch) const {
    bool complete = true;
    for (int peer = m.thread(); peer < N; peer += m.num_threads()) {
      const uint64_t* flag = &v.headers[v.rank]->signals.flags[m.block()][peer];
      complete &= wait_flag(flag, peer, epoch);
    }
    return m.all(complete);
  }

  JAXKV_DEVICE bool wait_flag(const uint64_t* flag, int peer, uint64_t epoch) const {
    uint64_t deadline = 0;
    for (uint32_t polls = 1;; ++polls) {
      const uint64_t seen = m.load_acquire(flag);
      if (static_cast<int64_t>(seen - epoch) >= 0) return true;  // epochs wrap
      if (polls % Machine::kPollsPerCheck == 0) {
        deadline = next_deadline(m, v, deadline, peer, Phase::kBarrier, epoch, seen);
        if (!deadline) return false;
      }
      m.pause();
    }
  }

  // ---- Words that signal their own arrival (LL) -------------------------------------------------

  JAXKV_DEVICE static bool is_set(const Word& w) {
    return w.part[0] != kUnset && w.part[1] != kUnset && w.part[2] != kUnset && w.part[3] != kUnset;
  }

  // Receives word `at` from all peers for which `pending` holds, and resets it. False if one did
  // not arrive before the timeout; the error then reports word `seen` of `expected`.
  template <class Pending>
  JAXKV_DEVICE bool receive(uint64_t ll_epoch, uint64_t at, Phase phase, uint64_t expected,
                            uint64_t seen, Pending pending, Word (&from)[N]) const {
    Word* buffers[N];
    JAXKV_UNROLL()
    for (int r = 0; r < N; ++r) buffers[r] = m.keep(ll_buffer(v.rank, ll_epoch, r) + at);
    uint64_t deadline = 0;
    for (uint32_t polls = 1;; ++polls) {
      int missing = -1;
      JAXKV_UNROLL()
      for (int r = 0; r < N; ++r) {
        if (pending(r)) from[r] = m.receive(buffers[r]);
      }
      JAXKV_UNROLL()
      for (int r = 0; r < N; ++r) missing = pending(r) && !is_set(from[r]) ? r : missing;
      if (missing < 0) break;
      if (polls % Machine::kPollsPerCheck == 0) {
        deadline = next_deadline(m, v, deadline, missing, phase, expected, seen);
        if (!deadline) return false;
      }
      m.pause();
    }
    stall();
    JAXKV_UNROLL()
    for (int r = 0; r < N; ++r) {
      if (pending(r)) m.send(buffers[r], {{kUnset, kUnset, kUnset, kUnset}});
    }
    return true;
  }

  // Sends to word `at` of the LL buffers of all peers. Each rank starts with a different peer.
  JAXKV_DEVICE void send(uint64_t ll_epoch, uint64_t at, const Word& word) const {
    JAXKV_UNROLL()
    for (int shift = 1; shift < N; ++shift) {
      m.send(ll_buffer((v.rank + shift) % N, ll_epoch, v.rank) + at, word);
    }
  }

  // ---- Comparison of calls ----------------------------------------------------------------------
  //
  // Ranks that make different calls at the same time would reduce unrelated data. So each rank
  // posts the mark of its call to all peers at the beginning, and ends the call when it has seen
  // the same mark from all. Marks and data need no mutual order: a mark contains the number of its
  // call, and since all earlier calls were the same on all ranks, data in a receive buffer of this
  // call was sent in the call of that number. No rank is two calls ahead, because it ends no call
  // without the marks of all; so two marks are stored per rank, and none is overwritten before it
  // was read.

  JAXKV_DEVICE static uint64_t* posted(const RankView& v, int owner, int from, uint64_t calls) {
    return &v.headers[owner]->signals.calls[calls % 2][from];
  }
  JAXKV_DEVICE void post(uint64_t mark, uint64_t calls) const {
    for (int peer = m.thread(); m.block() == 0 && peer < N; peer += m.num_threads()) {
      m.post(posted(v, peer, v.rank, calls), mark);
    }
  }
  // One thread polls for each peer.
  JAXKV_DEVICE bool calls_match(uint64_t mark, uint64_t calls) const {
    for (int peer = m.thread(); peer < N; peer += m.num_threads()) {
      uint64_t deadline = 0, seen;
      for (uint32_t polls = 1; (seen = m.peek(posted(v, v.rank, peer, calls))) != mark; ++polls) {
        if (polls % Machine::kPollsPerCheck == 0) {
          deadline = next_deadline(m, v, deadline, peer, Phase::kCall, mark, seen);
          if (!deadline) return false;
        }
        m.pause();
      }
    }
    return true;
  }
  // A peer that has posted a different call with the same number; -1 if there is none.
  JAXKV_DEVICE static int find_mismatch(const Machine& m, const RankView& v) {
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

  JAXKV_DEVICE void stall() const { collectives::stall(m, v); }  // in test builds only
};

}  // namespace jaxkv::collectives
