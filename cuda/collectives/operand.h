// Words of the operand and result of an all-reduce, and their reduction. One source for CUDA
// kernels and for the CPU backend; see all_reduce.h for `Machine` and `Element`.
#pragma once

#include "collectives/peers.h"

namespace jaxkv::collectives {

enum class Algorithm : int64_t { kLowLatency, kOneShot, kTwoShot, kMultimem };

// An integral number of elements, `bytes` in total, at addresses aligned for one element.
struct Message {
  const char* in;
  char* out;
  uint64_t bytes;
  Algorithm algorithm;
  xla::ffi::DataType dtype;
  uint64_t signature;  // of program and call, below kSignatures; equal on all ranks
};

template <class Machine, class Element, int N>
struct Operand : Peers<Machine, N> {
  using Bits = typename Element::Bits;
  using Peers<Machine, N>::m, Peers<Machine, N>::v;

  const Message& message;

  JAXKV_DEVICE Operand(const Machine& machine, const RankView& view, const Message& of)
      : Peers<Machine, N>{machine, view}, message(of) {}

  JAXKV_DEVICE uint64_t mark(const RankProgress& at_start) const {
    return call_mark(message.signature, at_start.calls);
  }
  // End of a call: true if all waits of the block completed and all ranks made the same call.
  JAXKV_DEVICE bool finish(const RankProgress& at_start, bool complete, uint64_t epochs,
                           uint64_t ll_epochs) const {
    if (!m.all(complete && this->calls_match(mark(at_start), at_start.calls))) return false;
    this->end(at_start, epochs, ll_epochs);
    return true;
  }

  JAXKV_DEVICE uint64_t words() const { return (message.bytes + sizeof(Word) - 1) / sizeof(Word); }
  JAXKV_DEVICE bool aligned() const {
    const auto addresses =
        reinterpret_cast<uintptr_t>(message.in) | reinterpret_cast<uintptr_t>(message.out);
    return addresses % sizeof(Word) == 0;
  }
  // Not truncated, and aligned for a word.
  JAXKV_DEVICE bool is_full_word(uint64_t i) const {
    return aligned() && (i + 1) * sizeof(Word) <= message.bytes;
  }
  JAXKV_DEVICE bool all_full_words() const {
    return aligned() && message.bytes % sizeof(Word) == 0;
  }

  JAXKV_DEVICE Word load_input(uint64_t i) const {
    return is_full_word(i) ? load_word<true>(i) : load_values(message, i);
  }
  JAXKV_DEVICE void store_output(uint64_t i, const Word& word) const {
    if (is_full_word(i)) return store_word<true>(i, word);
    store_values(message, i, word.part[0], word.part[1], word.part[2], word.part[3]);
  }
  // The same, with a compile-time guarantee that all words are full and aligned.
  template <bool kFullWord>
  JAXKV_DEVICE Word load_word(uint64_t i) const {
    if constexpr (!kFullWord) return load_input(i);
    return m.load(reinterpret_cast<const Word*>(message.in) + i);
  }
  template <bool kFullWord>
  JAXKV_DEVICE void store_word(uint64_t i, const Word& word) const {
    if constexpr (!kFullWord) return store_output(i, word);
    m.store(reinterpret_cast<Word*>(message.out) + i, word);
  }
  // Element by element, for a word that is truncated or not aligned; rare, so not inlined.
  JAXKV_NOINLINE static Word load_values(const Message& message, uint64_t i) {
    Word word{};
    const auto* in = reinterpret_cast<const Bits*>(message.in);
    for (uint64_t k = i * Element::kLanes; k < end_of(message, i); ++k) {
      word.part[part_of(k)] |= uint32_t{in[k]} << shift_of(k);
    }
    return word;
  }
  JAXKV_NOINLINE static void store_values(const Message& message, uint64_t i, uint32_t p0,
                                          uint32_t p1, uint32_t p2, uint32_t p3) {
    const Word word{{p0, p1, p2, p3}};
    auto* out = reinterpret_cast<Bits*>(message.out);
    for (uint64_t k = i * Element::kLanes; k < end_of(message, i); ++k) {
      out[k] = static_cast<Bits>(word.part[part_of(k)] >> shift_of(k));
    }
  }
  JAXKV_DEVICE static uint64_t end_of(const Message& message, uint64_t i) {
    const uint64_t end = (i + 1) * Element::kLanes, values = message.bytes / sizeof(Bits);
    return end < values ? end : values;
  }
  // Position of value k of the operand within its word.
  JAXKV_DEVICE static int part_of(uint64_t k) { return k % Element::kLanes * sizeof(Bits) / 4; }
  JAXKV_DEVICE static int shift_of(uint64_t k) { return k * sizeof(Bits) % 4 * 8; }

  // In rank order, with this rank's own word.
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

  // Replaces the sentinel value in data to be sent, so that it is not taken for a word that has not
  // arrived.
  JAXKV_DEVICE static Word without_sentinel(Word word) {
    JAXKV_UNROLL()
    for (uint32_t& part : word.part) part = part == kUnset ? Element::kSubstituteNan : part;
    return word;
  }
};

}  // namespace jaxkv::collectives
