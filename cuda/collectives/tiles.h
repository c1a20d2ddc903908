// two_shot with parts larger than the LL buffers: in tiles, with one flag for each round. One
// source for CUDA kernels and for the CPU backend; see all_reduce.h for `Machine` and `Element`.
//
// In each round a block scatters a tile of every part, reduces the tile that it received in the
// previous round, and gathers the sums of the round before that. All its tile buffers are its own,
// independent of the message, so it synchronizes only with the blocks of the same index of its
// peers: one flag signals the end of a round. Before it reduces in round k, a block knows that its
// peers have ended round k - 1. So in round k
// - it scatters to the buffers of round k - 3, which peers reduced in round k - 2;
// - it sends sums to the buffers of round k - 3, which peers gathered in round k - 1 at the latest;
// - in the next call it reuses the buffers of this call's last rounds: their scattered words have
//   been reduced, as it knew before it ended this call, and it sends sums only after its peers have
//   ended a round of the next call.
#pragma once

#include "collectives/operand.h"

namespace jaxkv::collectives {

template <class Machine, class Element, int N>
struct Tiles : Operand<Machine, Element, N> {
  using Base = Operand<Machine, Element, N>;
  using Base::m, Base::v, Base::words, Base::stall, Base::sum;

  JAXKV_DEVICE Tiles(const Machine& machine, const RankView& view, const Message& message)
      : Base{machine, view, message} {}

  // Returns true if the sum is in `out`, false if a wait timed out. `kAllFullWords`: see
  // all_full_words().
  template <bool kAllFullWords>
  JAXKV_DEVICE bool tiled(const RankProgress& at_start) {
    const uint64_t share = (words() + N - 1) / N,
                   words_per_round = m.num_blocks() * v.geometry.tile_words;
    const uint64_t rounds = (share + words_per_round - 1) / words_per_round;
    auto of_round = [&](uint64_t k) { return Tile(*this, share, k, k < rounds); };
    for (uint64_t k = 0; k < rounds + 2; ++k) {
      scatter_tile<kAllFullWords>(of_round(k));
      stall();
      if (k > 0 && !Base::wait_all(at_start.epoch + k)) return false;
      stall();
      reduce_and_gather<kAllFullWords>(of_round(k - 1), of_round(k - 2));
      if (k <= rounds) Base::arrive(at_start.epoch + k + 1);
    }
    return Base::finish(at_start, true, rounds + 2, 0);
  }

 private:
  // Range of this block within each rank's part in a round; empty before the first round and after
  // the last.
  struct Tile {
    uint64_t round, share, base;
    uint32_t size = 0;
    JAXKV_DEVICE Tile(const Tiles& call, uint64_t share, uint64_t round, bool exists)
        : round(round), share(share) {
      const uint64_t limit = call.v.geometry.tile_words;
      base = (round * call.m.num_blocks() + call.m.block()) * limit;
      if (exists && base < share) size = share - base < limit ? share - base : limit;
    }
  };

  // Words of the message in one rank's part of a tile; truncated at the end of the message.
  template <bool kAllFullWords>
  struct Row {
    const Tiles& call;
    uint64_t first;
    uint32_t size;
    JAXKV_DEVICE Row(const Tiles& call, const Tile& tile, int r)
        : call(call), first(r * tile.share + tile.base), size(tile.size) {
      const uint64_t end = call.words();
      if (first + size > end) size = first < end ? end - first : 0;
    }
    JAXKV_DEVICE bool has(uint32_t at) const { return at < size; }
    JAXKV_DEVICE const Word* in() const {
      return reinterpret_cast<const Word*>(call.message.in) + first;
    }
    JAXKV_DEVICE Word load(uint32_t at) const {
      return call.template load_word<kAllFullWords>(first + at);
    }
    JAXKV_DEVICE void store(uint32_t at, const Word& word) const {
      call.template store_word<kAllFullWords>(first + at, word);
    }
  };

  // Words that a thread loads before it stores the first of them.
  static constexpr int kBatch = N == 2 ? 4 : N == 4 ? 2 : 1;

  template <bool kAllFullWords>
  JAXKV_DEVICE void scatter_tile(const Tile& tile) const {
    const uint32_t stride = m.num_threads();
    const Row<kAllFullWords> own(*this, tile, v.rank);
    for (uint32_t i = m.thread(); i < tile.size; i += kBatch * stride) {
      Word word[kBatch][N];
      JAXKV_UNROLL()
      for (int shift = 1; shift < N; ++shift) {
        const Row<kAllFullWords> row(*this, tile, (v.rank + shift) % N);
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
        const Row<kAllFullWords> row(*this, tile, r);
        Word* const to = tile_buffer(r, tile, false, v.rank);
        JAXKV_UNROLL()
        for (int b = 0; b < kBatch; ++b) {
          const uint32_t at = i + b * stride;
          if (row.has(at)) m.store(to + at, word[b][shift]);
        }
      }
    }
  }

  // Combined, because the words of both have arrived: the loads of one hide the latency of the
  // other.
  template <bool kAllFullWords>
  JAXKV_DEVICE void reduce_and_gather(const Tile& to_reduce, const Tile& to_gather) const {
    const uint32_t stride = m.num_threads(),
                   size = to_reduce.size < to_gather.size ? to_gather.size : to_reduce.size;
    const Row<kAllFullWords> own_row(*this, to_reduce, v.rank);
    for (uint32_t i = m.thread(); i < size; i += kBatch * stride) {
      Word own[kBatch], from[kBatch][N], sums[kBatch][N];
      JAXKV_UNROLL()
      for (int b = 0; b < kBatch; ++b) {
        const uint32_t at = i + b * stride;
        if (own_row.has(at)) own[b] = own_row.load(at);
      }
      JAXKV_UNROLL()
      for (int r = 0; r < N; ++r) {
        if (r == v.rank) continue;
        const Row<kAllFullWords> row(*this, to_gather, r);
        const Word* const words = tile_buffer(v.rank, to_reduce, false, r);
        const Word* const totals = tile_buffer(v.rank, to_gather, true, r);
        JAXKV_UNROLL()
        for (int b = 0; b < kBatch; ++b) {
          const uint32_t at = i + b * stride;
          if (own_row.has(at)) from[b][r] = m.load_received(words + at);
          if (row.has(at)) sums[b][r] = m.load_received(totals + at);
        }
      }
      JAXKV_UNROLL()
      for (int b = 0; b < kBatch; ++b) {
        const uint32_t at = i + b * stride;
        if (!own_row.has(at)) continue;
        const Word total = sum(own[b], from[b]);
        JAXKV_UNROLL()
        for (int shift = 1; shift < N; ++shift) {
          m.store(tile_buffer((v.rank + shift) % N, to_reduce, true, v.rank) + at, total);
        }
        own_row.store(at, total);
      }
      JAXKV_UNROLL()
      for (int r = 0; r < N; ++r) {
        if (r == v.rank) continue;
        const Row<kAllFullWords> row(*this, to_gather, r);
        JAXKV_UNROLL()
        for (int b = 0; b < kBatch; ++b) {
          const uint32_t at = i + b * stride;
          if (row.has(at)) row.store(at, sums[b][r]);
        }
      }
    }
  }
  JAXKV_DEVICE Word* tile_buffer(int owner, const Tile& of, bool sums, int from) const {
    return Base::tile(owner, of.round, sums, from);
  }
};

}  // namespace jaxkv::collectives
