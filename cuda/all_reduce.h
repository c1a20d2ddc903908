// An all-reduce as one rank runs it: one source for blocks of a CUDA kernel and for the CPU
// backend.
//
// `Machine` says which of a rank's threads this is (block, num_blocks, thread, num_threads) and how
// it reads and writes memory that peers share. `Element` adds up the values of a word in f32.
// Ranks are always added in the order of their numbers, so results are equal bit for bit; but
// multimem leaves the order to the switch, and is equal on all ranks because one adds up for all.
//
// low_latency, and two_shot while its parts fit into the quick boxes, know no barriers: words say
// themselves that they have arrived. Who reads a word clears it, and it is sent anew two turns
// later. In the turn between, the sender has got words for which this rank's were needed, and
// those this rank sent when its kernel of the turn before, with all that it cleared, had ended.
//
// Larger two_shots go in tiles. In each round a block scatters a tile of every part, adds up the
// one that it got in the round before, and fetches the sums of the one before that, all from boxes
// of its own, whatever the message: what its peers' blocks of the same number tell is enough. They
// tell that they have ended a round by one flag. Before it adds up in round k, a block knows that
// its peers have ended round k - 1. So in round k
// - it scatters where it did in round k - 3, which peers added up in round k - 2;
// - it sends sums where it did in round k - 3, which peers fetched in round k - 1 at the latest;
// - and in the next call, where it did in this call's last rounds: what was scattered there has
//   been added up, as it knew before it ended, and sums it sends when its peers have ended a round
//   of that call.
//
// one_shot writes a half of its boxes two calls later, when this rank has come to the barrier of
// the call between, after reading.
//
// multimem needs no halves. Between the two barriers of a round the switch reads and writes the
// workspaces of all ranks for all; before and after, each is its own rank's alone, and a word there
// is always the same thread's. What one thread adds up, threads of the same number have staged, in
// blocks of the same number: those that have met.
#pragma once

#include "peers.h"

namespace jaxkv {

enum class Algorithm : int64_t { kLowLatency, kOneShot, kTwoShot, kMultimem };

// `bytes` of whole elements at any address that is aligned for one.
struct Message {
  const char* in;
  char* out;
  uint64_t bytes;
  Algorithm algorithm;
  xla::ffi::DataType dtype;
};

// Each has a kernel of its own, so that none takes registers from the others.
enum class Route { kPlain, kTiled, kSwitched };

inline Route route_of(const Message& message, const Geometry& geometry) {
  if (message.algorithm == Algorithm::kMultimem) return Route::kSwitched;
  const uint64_t in_parts = geometry.part_words() * geometry.world * sizeof(Word);
  const bool tiled = message.algorithm == Algorithm::kTwoShot && message.bytes > in_parts;
  return tiled ? Route::kTiled : Route::kPlain;
}

template <class Machine, class Element, int N>
struct Call : Peers<Machine, N> {
  const Message& message;

  JAXKV_DEVICE Call(const Machine& machine, const RankView& view, const Message& of)
      : Peers<Machine, N>{machine, view}, message(of) {}

  // True if the sum is in `out`, false if a wait gave up.
  template <Route kRoute>
  JAXKV_DEVICE bool run() {
    const Progress at_start = progress();
    // All threads of the block decide alike, although another block may give up meanwhile.
    if (m.all(!at_start.broken) && agreed(at_start) && reduced<kRoute>(at_start)) return true;
    // Rather NaN than a wrong sum. What this block missed lies anywhere.
    for (uint64_t i = m.thread(); i < words(); i += m.num_threads()) {
      store_output(i, {{kAbsent, kAbsent, kAbsent, kAbsent}});
    }
    return false;
  }

 private:
  using Bits = typename Element::Bits;
  using Base = Peers<Machine, N>;
  using Base::m, Base::v, Base::progress, Base::slot, Base::tile, Base::stall, Base::meet;

  JAXKV_DEVICE static uint64_t signature(const Message& message, uint64_t calls) {
    return (message.bytes << 8 | static_cast<uint64_t>(message.dtype) << 2 |
            static_cast<uint64_t>(message.algorithm)) *
               kCallNumbers +
           (calls + 1) % kCallNumbers;
  }
  JAXKV_DEVICE bool agreed(const Progress& at_start) const {
    return !v.debug ||
           m.all(Base::agrees(m, v, signature(message, at_start.calls), at_start.calls));
  }

  JAXKV_DEVICE uint64_t words() const { return (message.bytes + sizeof(Word) - 1) / sizeof(Word); }
  JAXKV_DEVICE uint64_t first() const { return m.block() * m.num_threads() + m.thread(); }
  JAXKV_DEVICE uint64_t step() const { return m.num_blocks() * m.num_threads(); }

  template <Route kRoute>
  JAXKV_DEVICE bool reduced(const Progress& at_start) {
    if constexpr (kRoute == Route::kSwitched) return multimem(at_start);
    if constexpr (kRoute == Route::kTiled) {
      return aligned() && message.bytes % sizeof(Word) == 0 ? tiled<true>(at_start)
                                                            : tiled<false>(at_start);
    }
    switch (message.algorithm) {
      case Algorithm::kLowLatency:
        return low_latency(at_start);
      case Algorithm::kOneShot:
        return one_shot(at_start);
      case Algorithm::kTwoShot:
        return two_shot(at_start);
      case Algorithm::kMultimem:
        break;
    }
    return false;
  }

  // ---- Words of the operand and of the result ---------------------------------------------------

  JAXKV_DEVICE bool aligned() const {
    const auto addresses =
        reinterpret_cast<uintptr_t>(message.in) | reinterpret_cast<uintptr_t>(message.out);
    return addresses % sizeof(Word) == 0;
  }
  JAXKV_DEVICE bool whole(uint64_t i) const {
    return aligned() && (i + 1) * sizeof(Word) <= message.bytes;
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

  // Of this rank's own word and those of its peers.
  JAXKV_DEVICE Word sum(const Word& own, const Word (&from)[N]) const {
    float lanes[Element::kLanes];
    JAXKV_UNROLL()
    for (int r = 0; r < N; ++r) {
      const Word word = r == v.rank ? own : from[r];
      JAXKV_UNROLL()
      for (int k = 0; k < Element::kLanes; ++k) {
        lanes[k] = r ? lanes[k] + Element::lane(word, k) : Element::lane(word, k);
      }
    }
    return Element::word(lanes);
  }

  // Words that are sent are not those that have not arrived.
  JAXKV_DEVICE static Word present(Word word) {
    JAXKV_UNROLL()
    for (uint32_t& part : word.part) part = part == kAbsent ? Element::kOtherNan : part;
    return word;
  }

  // ---- Algorithms -------------------------------------------------------------------------------

  // Every rank sends everything to all.
  JAXKV_DEVICE bool low_latency(const Progress& at_start) {
    const uint64_t turn = at_start.turns;
    auto due = [this](int r) { return r != v.rank; };
    for (uint64_t i = first(); i < words(); i += step())
      Base::send(turn, i, present(load_input(i)));
    stall();
    bool came = true;
    for (uint64_t i = first(); came && i < words(); i += step()) {
      const Word own = present(load_input(i));
      Word from[N];
      came = Base::receive(turn, i, Phase::kQuick, words(), i, due, from);
      if (came) store_output(i, sum(own, from));
    }
    if (!m.all(came)) return false;
    Base::end(at_start, 0, 1);
    return true;
  }

  // Each rank adds up one part and sends the sum to all.
  JAXKV_DEVICE bool two_shot(const Progress& at_start) {
    const Chunk parts{0, (words() + N - 1) / N};
    scatter(parts, at_start.turns);
    const bool came = reduce(parts, at_start.turns) && gather(parts, at_start.turns);
    if (!m.all(came)) return false;
    Base::end(at_start, 0, 1);
    return true;
  }

  // N parts of `part` words; the last ones are cut off where the message ends.
  struct Chunk {
    uint64_t base, part;
    JAXKV_DEVICE uint64_t begin(int r) const { return base + r * part; }
  };
  JAXKV_DEVICE bool has(const Chunk& chunk, int r, uint64_t i) const {
    return chunk.begin(r) + i < words();
  }

  JAXKV_DEVICE void scatter(const Chunk& parts, uint64_t turn) const {
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
        if (has(parts, r, i)) m.send(Base::quick(r, turn, v.rank) + i, present(word[shift]));
      }
    }
  }

  JAXKV_DEVICE bool reduce(const Chunk& parts, uint64_t turn) const {
    const uint64_t begin = parts.begin(v.rank);
    auto due = [this](int r) { return r != v.rank; };
    for (uint64_t i = first(); i < parts.part && has(parts, v.rank, i); i += step()) {
      const Word own = present(load_input(begin + i));
      Word from[N];
      if (!Base::receive(turn, i, Phase::kScatter, parts.part, i, due, from)) return false;
      const Word total = present(sum(own, from));
      Base::send(turn, v.geometry.part_words() + i, total);
      store_output(begin + i, total);
    }
    return true;
  }

  JAXKV_DEVICE bool gather(const Chunk& parts, uint64_t turn) const {
    for (uint64_t i = first(); i < parts.part; i += step()) {
      auto due = [&](int r) { return r != v.rank && has(parts, r, i); };
      Word from[N];
      if (!Base::receive(turn, v.geometry.part_words() + i, Phase::kGather, parts.part, i, due,
                         from)) {
        return false;
      }
      JAXKV_UNROLL()
      for (int r = 0; r < N; ++r) {
        if (due(r)) store_output(parts.begin(r) + i, from[r]);
      }
    }
    return true;
  }

  // The same, with parts that are longer than boxes.
  template <bool kAllWhole>
  JAXKV_DEVICE bool tiled(const Progress& at_start) {
    const uint64_t share = (words() + N - 1) / N, of_all = m.num_blocks() * v.geometry.tile_words;
    const uint64_t rounds = (share + of_all - 1) / of_all;
    auto of_round = [&](uint64_t k) { return Tile(*this, share, k, k < rounds); };
    for (uint64_t k = 0; k < rounds + 2; ++k) {
      scatter_tile<kAllWhole>(of_round(k));
      stall();
      if (k > 0 && !Base::all_came(at_start.epoch + k)) return false;
      stall();
      add_up_and_fetch<kAllWhole>(of_round(k - 1), of_round(k - 2));
      if (k <= rounds) Base::come(at_start.epoch + k + 1);
    }
    Base::end(at_start, rounds + 2, 0);
    return true;
  }

  // What this block has of each rank's part in a round: nothing, before the first and after the
  // last.
  struct Tile {
    uint64_t round, share, base;
    uint32_t size = 0;
    JAXKV_DEVICE Tile(const Call& call, uint64_t share, uint64_t round, bool exists)
        : round(round), share(share) {
      const uint64_t limit = call.v.geometry.tile_words;
      base = (round * call.m.num_blocks() + call.m.block()) * limit;
      if (exists && base < share) size = share - base < limit ? share - base : limit;
    }
  };

  // Words of the message: those of a tile in one rank's part, which may end with the message.
  template <bool kAllWhole>
  struct Row {
    const Call& call;
    uint64_t first;
    uint32_t size;
    JAXKV_DEVICE Row(const Call& call, const Tile& tile, int r)
        : call(call), first(r * tile.share + tile.base), size(tile.size) {
      const uint64_t end = call.words();
      if (first + size > end) size = first < end ? end - first : 0;
    }
    JAXKV_DEVICE bool has(uint32_t at) const { return at < size; }
    JAXKV_DEVICE const Word* in() const {
      return reinterpret_cast<const Word*>(call.message.in) + first;
    }
    JAXKV_DEVICE Word load(uint32_t at) const {
      return kAllWhole ? call.m.load(in() + at) : call.load_input(first + at);
    }
    JAXKV_DEVICE void store(uint32_t at, const Word& word) const {
      if constexpr (kAllWhole) {
        call.m.store(reinterpret_cast<Word*>(call.message.out) + first + at, word);
      } else {
        call.store_output(first + at, word);
      }
    }
  };

  // Words that a thread loads before it stores the first of them.
  static constexpr int kBatch = N == 2 ? 4 : N == 4 ? 2 : 1;

  template <bool kAllWhole>
  JAXKV_DEVICE void scatter_tile(const Tile& tile) const {
    const uint32_t stride = m.num_threads();
    const Row<kAllWhole> own(*this, tile, v.rank);
    for (uint32_t i = m.thread(); i < tile.size; i += kBatch * stride) {
      Word word[kBatch][N];
      JAXKV_UNROLL()
      for (int shift = 1; shift < N; ++shift) {
        const Row<kAllWhole> row(*this, tile, (v.rank + shift) % N);
        JAXKV_UNROLL()
        for (int b = 0; b < kBatch; ++b) {
          const uint32_t at = i + b * stride;
          if (row.has(at)) word[b][shift] = row.load(at);
        }
      }
      JAXKV_UNROLL()
      for (int b = 0; b < kBatch; ++b) {
        const uint32_t at = i + b * stride;
        if (own.has(at)) m.prefetch(own.in() + at);
      }
      JAXKV_UNROLL()
      for (int shift = 1; shift < N; ++shift) {
        const int r = (v.rank + shift) % N;
        const Row<kAllWhole> row(*this, tile, r);
        Word* const to = box(r, tile, false, v.rank);
        JAXKV_UNROLL()
        for (int b = 0; b < kBatch; ++b) {
          const uint32_t at = i + b * stride;
          if (row.has(at)) m.store(to + at, word[b][shift]);
        }
      }
    }
  }

  // Both at once, as the words of both are here: the loads of one hide those of the other.
  template <bool kAllWhole>
  JAXKV_DEVICE void add_up_and_fetch(const Tile& due, const Tile& done) const {
    const uint32_t stride = m.num_threads(), size = due.size < done.size ? done.size : due.size;
    const Row<kAllWhole> mine(*this, due, v.rank);
    for (uint32_t i = m.thread(); i < size; i += kBatch * stride) {
      Word own[kBatch], from[kBatch][N], sums[kBatch][N];
      JAXKV_UNROLL()
      for (int b = 0; b < kBatch; ++b) {
        const uint32_t at = i + b * stride;
        if (mine.has(at)) own[b] = mine.load(at);
      }
      JAXKV_UNROLL()
      for (int r = 0; r < N; ++r) {
        if (r == v.rank) continue;
        const Row<kAllWhole> row(*this, done, r);
        const Word* const words = box(v.rank, due, false, r);
        const Word* const totals = box(v.rank, done, true, r);
        JAXKV_UNROLL()
        for (int b = 0; b < kBatch; ++b) {
          const uint32_t at = i + b * stride;
          if (mine.has(at)) from[b][r] = m.load_mail(words + at);
          if (row.has(at)) sums[b][r] = m.load_mail(totals + at);
        }
      }
      JAXKV_UNROLL()
      for (int b = 0; b < kBatch; ++b) {
        const uint32_t at = i + b * stride;
        if (!mine.has(at)) continue;
        const Word total = sum(own[b], from[b]);
        JAXKV_UNROLL()
        for (int shift = 1; shift < N; ++shift) {
          m.store(box((v.rank + shift) % N, due, true, v.rank) + at, total);
        }
        mine.store(at, total);
      }
      JAXKV_UNROLL()
      for (int r = 0; r < N; ++r) {
        if (r == v.rank) continue;
        const Row<kAllWhole> row(*this, done, r);
        JAXKV_UNROLL()
        for (int b = 0; b < kBatch; ++b) {
          const uint32_t at = i + b * stride;
          if (row.has(at)) row.store(at, sums[b][r]);
        }
      }
    }
  }
  JAXKV_DEVICE Word* box(int owner, const Tile& of, bool sums, int from) const {
    return tile(owner, of.round, sums, from);
  }

  // Every rank sends everything to all, and adds up when all have met.
  JAXKV_DEVICE bool one_shot(const Progress& at_start) {
    const uint64_t epoch = at_start.epoch;
    for (uint64_t i = first(); i < words(); i += step()) {
      const Word word = load_input(i);
      JAXKV_UNROLL()
      for (int shift = 1; shift < N; ++shift) {
        m.store(slot((v.rank + shift) % N, epoch, v.rank) + i, word);
      }
    }
    stall();
    if (!meet(epoch + 1)) return false;
    stall();
    for (uint64_t i = first(); i < words(); i += step()) {
      const Word own = load_input(i);
      Word from[N];
      JAXKV_UNROLL()
      for (int r = 0; r < N; ++r) {
        if (r != v.rank) from[r] = m.load_mail(slot(v.rank, epoch, r) + i);
      }
      store_output(i, sum(own, from));
    }
    Base::end(at_start, 1, 0);
    return true;
  }

  // Each rank has the switch add up one part of all ranks' workspaces and write the sums to all, in
  // rounds of as much as a workspace holds.
  JAXKV_DEVICE bool multimem(const Progress& at_start) {
    const uint64_t limit = v.geometry.multicast_words / N, share = (words() + N - 1) / N;
    const uint64_t part = share < limit ? share : limit;
    const uint64_t rounds = (share + part - 1) / part;
    for (uint64_t k = 0; k < rounds; ++k) {
      const Chunk chunk{k * N * part, part};
      const uint64_t epoch = at_start.epoch + 2 * k;
      for_each_part(chunk, [&](uint64_t at, uint64_t i) { m.store(v.staged + at, load_input(i)); });
      stall();
      if (!meet_by_switch(epoch + 1)) return false;
      stall();
      const uint64_t begin = v.rank * part;
      for (uint64_t i = first(); i < part && has(chunk, v.rank, i); i += step()) {
        m.store_all(v, begin + i, m.template load_sum<Element>(v, begin + i));
      }
      if (!meet_by_switch(epoch + 2)) return false;
      for_each_part(chunk,
                    [&](uint64_t at, uint64_t i) { store_output(i, m.load_mail(v.staged + at)); });
    }
    Base::end(at_start, 2 * rounds, 0);
    return true;
  }

  // What was written by way of one address is read by way of another after that.
  JAXKV_DEVICE bool meet_by_switch(uint64_t epoch) const {
    m.publish();
    m.alias();
    const bool came = meet(epoch);
    m.alias();
    return came;
  }

  // `body(at, i)` for this thread's words of all parts: `at` in the chunk, `i` in the message.
  template <class Body>
  JAXKV_DEVICE void for_each_part(const Chunk& chunk, Body body) const {
    for (uint64_t i = first(); i < chunk.part; i += step()) {
      for (int r = 0; r < N && has(chunk, r, i); ++r) {
        body(r * chunk.part + i, chunk.begin(r) + i);
      }
    }
  }
};

// What a handler was asked for, once it is known to fit.
struct Task {
  std::shared_ptr<Communicator> communicator;
  Communicator::Rank* rank;
  Message message;
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
