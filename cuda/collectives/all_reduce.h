// All-reduce as executed by one rank: one source for the thread blocks of a CUDA kernel and for the
// CPU backend. The tiled two-shot route is in tiles.h.
//
// `Machine` provides the position of the calling thread within its rank (block, num_blocks, thread,
// num_threads), the accesses to memory that is shared with peers, and the number of polls between
// two checks of a timeout. `Element` converts the values of a word to and from f32. Values are
// always added in rank order, so results are bitwise identical on all ranks and in all runs.
// multimem leaves the order to the switch; its results are identical on all ranks because each word
// is reduced once, for all ranks.
//
// low_latency, and two_shot as long as its parts fit the LL buffers, use no barriers: the data is
// its own flag. The receiver resets each word after reading it, and the same word is sent again two
// LL epochs later. By then the reset is complete: in the epoch in between, the sender has received
// words that could not be sent without words of this rank, and this rank sent its words after its
// kernel of the previous epoch, with all its resets, had ended.
//
// one_shot reuses a half of the slot buffers two calls later. By then the receiver has arrived at
// the barrier of the call in between, which it does after reading that half.
//
// multimem needs no double buffering. Between the two barriers of a round the switch reads and
// writes the workspaces of all ranks; before and after that each workspace is accessed only by its
// own rank, and each of its words always by the same thread. The words that a thread reduces were
// staged by threads with the same index in blocks with the same index, which are the blocks that
// the barrier synchronizes.
#pragma once

#include "collectives/tiles.h"

namespace jaxkv::collectives {

// Code paths: one for each algorithm, and the tiled two_shot. Each is a separate kernel, so that
// none is compiled for the register count of another.
enum class Route { kLowLatency, kOneShot, kTwoShot, kMultimem, kTiled };

inline Route route_of(const Message& message, const Geometry& geometry) {
  const uint64_t in_parts = geometry.part_words() * geometry.world_size * sizeof(Word);
  const bool tiled = message.algorithm == Algorithm::kTwoShot && message.bytes > in_parts;
  return tiled ? Route::kTiled : static_cast<Route>(message.algorithm);
}

// Runs `body.template operator()<route>()`.
template <class Body>
auto with_route(Route route, Body body) {
  switch (route) {
    case Route::kLowLatency:
      return body.template operator()<Route::kLowLatency>();
    case Route::kOneShot:
      return body.template operator()<Route::kOneShot>();
    case Route::kTwoShot:
      return body.template operator()<Route::kTwoShot>();
    case Route::kMultimem:
      return body.template operator()<Route::kMultimem>();
    default:
      return body.template operator()<Route::kTiled>();
  }
}

template <class Machine, class Element, int N>
struct Call : Tiles<Machine, Element, N> {
  JAXKV_DEVICE Call(const Machine& machine, const RankView& view, const Message& message)
      : Tiles<Machine, Element, N>{machine, view, message} {}

  // Returns true if the sum is in `out`, false if a wait timed out.
  template <Route kRoute>
  JAXKV_DEVICE bool run() {
    RankProgress at_start = progress();
    // Non-blocking sends are issued before the threads synchronize with the rest of their block.
    // But a rank that timed out in an earlier call sends nothing: a peer that arrives late at that
    // call would take any word in its receive buffers for a word of that call.
    const bool early = kRoute == Route::kLowLatency && first() < words();
    const Word head = early ? load_input(first()) : Word{};
    if (early && !at_start.failed) Base::send(at_start.ll_epochs, first(), without_sentinel(head));
    if (!at_start.failed) Base::post(Base::mark(at_start), at_start.calls);
    if (kRoute == Route::kTwoShot && !at_start.failed) scatter(parts(), at_start.ll_epochs);
    // All threads of the block decide alike, although another block may time out at the same time.
    if (m.all(!at_start.failed)) {
      Base::enter(at_start);
      if (reduced<kRoute>(at_start, head)) return true;
    }
    Base::report(m, v);
    // NaN rather than a wrong sum, in the entire output: the words that this block missed can be
    // anywhere.
    for (uint64_t i = m.thread(); i < words(); i += m.num_threads()) {
      store_output(i, {{kUnset, kUnset, kUnset, kUnset}});
    }
    return false;
  }

 private:
  using Base = Tiles<Machine, Element, N>;
  using Base::m, Base::v, Base::message, Base::progress, Base::slot, Base::stall, Base::barrier;
  using Base::words, Base::load_input, Base::store_output, Base::sum, Base::without_sentinel,
      Base::finish;

  JAXKV_DEVICE uint64_t first() const { return m.block() * m.num_threads() + m.thread(); }
  JAXKV_DEVICE uint64_t step() const { return m.num_blocks() * m.num_threads(); }

  template <Route kRoute>
  JAXKV_DEVICE bool reduced(const RankProgress& at_start, const Word& head) {
    if constexpr (kRoute == Route::kLowLatency) {
      return Base::all_full_words() ? low_latency<true>(at_start, head)
                                    : low_latency<false>(at_start, head);
    }
    if constexpr (kRoute == Route::kOneShot) return one_shot(at_start);
    if constexpr (kRoute == Route::kTwoShot) return two_shot(at_start);
    if constexpr (kRoute == Route::kMultimem) return multimem(at_start);
    if constexpr (kRoute == Route::kTiled) {
      return Base::all_full_words() ? Base::template tiled<true>(at_start)
                                    : Base::template tiled<false>(at_start);
    }
  }

  // ---- Algorithms -------------------------------------------------------------------------------

  // Every rank sends all its words to all peers; the first word of each thread has already been
  // sent by run(). `kAllFullWords`: see all_full_words().
  template <bool kAllFullWords>
  JAXKV_DEVICE bool low_latency(const RankProgress& at_start, const Word& head) {
    const uint64_t ll_epoch = at_start.ll_epochs;
    // 32-bit indices are sufficient for an LL buffer.
    const uint32_t end = words(), begin = first(), stride = step();
    auto pending = [this](int r) { return r != v.rank; };
    auto load = [&](uint32_t i) {
      return without_sentinel(i == begin ? head : Base::template load_word<kAllFullWords>(i));
    };
    for (uint32_t i = begin + stride; i < end; i += stride) Base::send(ll_epoch, i, load(i));
    stall();
    bool complete = true;
    for (uint32_t i = begin; complete && i < end; i += stride) {
      const Word own = load(i);
      Word from[N];
      complete = Base::receive(ll_epoch, i, Phase::kLowLatency, end, i, pending, from);
      if (complete) Base::template store_word<kAllFullWords>(i, sum(own, from));
    }
    return finish(at_start, complete, 0, 1);
  }

  // Each rank reduces one part, which run() has already scattered, and sends the result to all
  // peers.
  JAXKV_DEVICE bool two_shot(const RankProgress& at_start) {
    const bool complete =
        reduce(parts(), at_start.ll_epochs) && gather(parts(), at_start.ll_epochs);
    return finish(at_start, complete, 0, 1);
  }

  // N parts of `part` words; the last parts are truncated at the end of the message.
  struct Chunk {
    uint64_t base, part;
    JAXKV_DEVICE uint64_t begin(int r) const { return base + r * part; }
  };
  JAXKV_DEVICE Chunk parts() const { return {0, (words() + N - 1) / N}; }
  JAXKV_DEVICE bool has(const Chunk& chunk, int r, uint64_t i) const {
    return chunk.begin(r) + i < words();
  }

  JAXKV_DEVICE void scatter(const Chunk& parts, uint64_t ll_epoch) const {
    for (uint64_t i = first(); i < parts.part; i += step()) {
      Word word[N];
      JAXKV_UNROLL()
      for (int shift = 1; shift < N; ++shift) {
        const int r = (v.rank + shift) % N;
        if (has(parts, r, i)) word[shift] = load_input(parts.begin(r) + i);
      }
      JAXKV_UNROLL()
      for (int shift = 1; shift < N; ++shift) {
        const int r = (v.rank + shift) % N;
        if (has(parts, r, i))
          m.send(Base::ll_buffer(r, ll_epoch, v.rank) + i, without_sentinel(word[shift]));
      }
    }
  }

  JAXKV_DEVICE bool reduce(const Chunk& parts, uint64_t ll_epoch) const {
    const uint64_t begin = parts.begin(v.rank);
    auto pending = [this](int r) { return r != v.rank; };
    for (uint64_t i = first(); i < parts.part && has(parts, v.rank, i); i += step()) {
      const Word own = without_sentinel(load_input(begin + i));
      Word from[N];
      if (!Base::receive(ll_epoch, i, Phase::kScatter, parts.part, i, pending, from)) return false;
      const Word total = without_sentinel(sum(own, from));
      Base::send(ll_epoch, v.geometry.part_words() + i, total);
      store_output(begin + i, total);
    }
    return true;
  }

  JAXKV_DEVICE bool gather(const Chunk& parts, uint64_t ll_epoch) const {
    for (uint64_t i = first(); i < parts.part; i += step()) {
      auto pending = [&](int r) { return r != v.rank && has(parts, r, i); };
      Word from[N];
      if (!Base::receive(ll_epoch, v.geometry.part_words() + i, Phase::kGather, parts.part, i,
                         pending, from)) {
        return false;
      }
      JAXKV_UNROLL()
      for (int r = 0; r < N; ++r) {
        if (pending(r)) store_output(parts.begin(r) + i, from[r]);
      }
    }
    return true;
  }

  // Every rank writes its message to all peers and reduces after the barrier.
  JAXKV_DEVICE bool one_shot(const RankProgress& at_start) {
    const uint64_t epoch = at_start.epoch;
    for (uint64_t i = first(); i < words(); i += step()) {
      const Word word = load_input(i);
      JAXKV_UNROLL()
      for (int shift = 1; shift < N; ++shift) {
        m.store(slot((v.rank + shift) % N, epoch, v.rank) + i, word);
      }
    }
    stall();
    if (!barrier(epoch + 1)) return false;
    stall();
    for (uint64_t i = first(); i < words(); i += step()) {
      const Word own = load_input(i);
      Word from[N];
      JAXKV_UNROLL()
      for (int r = 0; r < N; ++r) {
        if (r != v.rank) from[r] = m.load_received(slot(v.rank, epoch, r) + i);
      }
      store_output(i, sum(own, from));
    }
    return finish(at_start, true, 1, 0);
  }

  // Each rank has the switch reduce one part over all workspaces and broadcast the result, in
  // rounds of at most one workspace.
  JAXKV_DEVICE bool multimem(const RankProgress& at_start) {
    const uint64_t limit = v.geometry.multicast_words / N, share = (words() + N - 1) / N;
    const uint64_t part = share < limit ? share : limit;
    const uint64_t rounds = (share + part - 1) / part;
    for (uint64_t k = 0; k < rounds; ++k) {
      const Chunk chunk{k * N * part, part};
      const uint64_t epoch = at_start.epoch + 2 * k;
      for_each_part(chunk, [&](uint64_t at, uint64_t i) { m.store(v.staged + at, load_input(i)); });
      stall();
      if (!multicast_barrier(epoch + 1)) return false;
      stall();
      const uint64_t begin = v.rank * part;
      for (uint64_t i = first(); i < part && has(chunk, v.rank, i); i += step()) {
        m.store_multicast(v, begin + i, m.template load_multicast_sum<Element>(v, begin + i));
      }
      if (!multicast_barrier(epoch + 2)) return false;
      for_each_part(
          chunk, [&](uint64_t at, uint64_t i) { store_output(i, m.load_received(v.staged + at)); });
    }
    return finish(at_start, true, 2 * rounds, 0);
  }

  // Orders accesses through one address before later accesses through the other address of the same
  // memory.
  JAXKV_DEVICE bool multicast_barrier(uint64_t epoch) const {
    m.publish();
    m.alias();
    const bool complete = barrier(epoch);
    m.alias();
    return complete;
  }

  // `body(at, i)` for this thread's words of all parts: index `at` in the chunk, `i` in the
  // message.
  template <class Body>
  JAXKV_DEVICE void for_each_part(const Chunk& chunk, Body body) const {
    for (uint64_t i = first(); i < chunk.part; i += step()) {
      for (int r = 0; r < N && has(chunk, r, i); ++r) {
        body(r * chunk.part + i, chunk.begin(r) + i);
      }
    }
  }
};

// A validated call.
struct Task {
  std::shared_ptr<Communicator> communicator;
  Communicator::Rank* rank;
  Message message;
};
xla::ffi::ErrorOr<Task> resolve_task(int32_t device, xla::ffi::AnyBuffer in,
                                     xla::ffi::Result<xla::ffi::AnyBuffer> out,
                                     int64_t communicator, int64_t algorithm, int64_t signature);

// Loads all kernels on a CUDA device: in the first call, loading could block while a peer waits.
// Returns how many blocks of those for `world_size` ranks the device holds at once.
BlockLimits load_all_reduce(int32_t device, int world_size);

// Runs `body.template operator()<N>()` with the number of ranks as a constant.
template <class Body>
auto with_world_size(int world_size, Body body) {
  switch (world_size) {
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

}  // namespace jaxkv::collectives
