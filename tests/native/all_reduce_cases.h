// All-reduces of all ranks of one process, and their exact results: the same cases for the CUDA
// kernels with all ranks on one GPU, and for the CPU backend.
//
// A result is compared bit for bit with a sum in rank order in float, rounded once by arithmetic on
// its significand: nothing of the implementation is used.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "collectives/grid.h"

namespace jaxkv::collectives::cases {

using Dtype = xla::ffi::DataType;

constexpr size_t kGuard = 64;         // bytes before and after each operand and result
constexpr uint8_t kGuardByte = 0xA5;  // a result that is not written is no NaN either
constexpr size_t kAlignment = 256;    // of operands and results without an offset

// Operands: integers whose sums are exact; values whose sums are rounded; the bits of the sentinel,
// which are a NaN, and zeros of both signs.
enum class Values { kExact, kRounded, kSentinels };

struct Case {
  Algorithm algorithm;
  Dtype dtype;
  uint64_t count;  // of values
  Values values = Values::kExact;
  uint64_t in_offset = 0, out_offset = 0;  // from an aligned address, in values
  uint64_t seed = 0;
};

inline size_t size_of(Dtype dtype) { return dtype == Dtype::F32 ? 4 : 2; }
inline uint64_t values_per_word(Dtype dtype) { return sizeof(Word) / size_of(dtype); }

inline Message message_of(const Case& c, const uint8_t* in, uint8_t* out, uint64_t signature) {
  return {reinterpret_cast<const char*>(in),
          reinterpret_cast<char*>(out),
          c.count * size_of(c.dtype),
          c.algorithm,
          c.dtype,
          signature};
}

// ---- Values -------------------------------------------------------------------------------------

struct Format {
  int significand, min_exponent, mantissa_bits;  // of normal numbers
  uint32_t bias;
};
inline Format format_of(Dtype dtype) {
  return dtype == Dtype::F16 ? Format{11, -14, 10, 15} : Format{8, -126, 7, 127};
}

// To nearest, ties to even; for finite values within the range of the dtype.
inline uint32_t bits_of(Dtype dtype, float value) {
  if (dtype == Dtype::F32) return std::bit_cast<uint32_t>(value);
  const Format f = format_of(dtype);
  const uint32_t sign = std::signbit(value) ? 0x8000 : 0;
  int exponent = 0;
  const double fraction = std::frexp(std::fabs(double{value}), &exponent);  // in [0.5, 1)
  const int lowest = std::max(exponent - f.significand, f.min_exponent - f.mantissa_bits);
  const auto units = static_cast<uint32_t>(std::nearbyint(std::ldexp(fraction, exponent - lowest)));
  if (units == 0) return sign;
  // Units of a normal number include its implicit bit, which increments the exponent field by one.
  const uint32_t field = lowest + f.mantissa_bits + f.bias - 1;
  return sign + (field << f.mantissa_bits) + units;
}

inline float value_of(Dtype dtype, uint32_t bits) {
  if (dtype == Dtype::F32) return std::bit_cast<float>(bits);
  const Format f = format_of(dtype);
  const uint32_t magnitude = bits & 0x7FFF, field = magnitude >> f.mantissa_bits;
  const uint32_t mantissa = magnitude & ((1u << f.mantissa_bits) - 1);
  if (field == (2 * f.bias + 1)) return std::numeric_limits<float>::quiet_NaN();  // no infinities
  const uint32_t units = field ? mantissa + (1u << f.mantissa_bits) : mantissa;
  const int exponent = static_cast<int>(field ? field : 1) - static_cast<int>(f.bias);
  const auto absolute = static_cast<float>(std::ldexp(units, exponent - f.mantissa_bits));
  return bits & 0x8000 ? -absolute : absolute;
}

inline uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

// Bits of value i of the operand of a rank.
inline uint32_t operand_bits(const Case& c, int rank, uint64_t i) {
  const uint64_t random = mixed(0x9E3779B97F4A7C15 * (i + 1) + 0x1000003 * (rank + 1) + c.seed);
  if (c.values == Values::kRounded) {
    const auto significand = static_cast<double>(random >> 40) + (1 << 24);  // 25 bits
    const int exponent = static_cast<int>(random % 8) - 4 - 24;
    const double value = std::ldexp(random & 256 ? significand : -significand, exponent);
    return bits_of(c.dtype, static_cast<float>(value));
  }
  if (c.values == Values::kSentinels && random % 8 < 3) {
    const uint32_t ones = c.dtype == Dtype::F32 ? 0xFFFFFFFF : 0xFFFF;
    const uint32_t minus_zero = c.dtype == Dtype::F32 ? 0x80000000 : 0x8000;
    return random % 8 == 0 ? ones : random % 8 == 1 ? minus_zero : 0;
  }
  return bits_of(c.dtype, static_cast<float>(static_cast<int>(random % 31) - 15));
}

inline bool is_nan(Dtype dtype, uint32_t bits) { return std::isnan(value_of(dtype, bits)); }

inline bool as_expected(const Case& c, int world_size, uint64_t i, uint32_t got) {
  float sum = value_of(c.dtype, operand_bits(c, 0, i));
  for (int rank = 1; rank < world_size; ++rank) {
    sum += value_of(c.dtype, operand_bits(c, rank, i));
  }
  return std::isnan(sum) ? is_nan(c.dtype, got) : got == bits_of(c.dtype, sum);
}

// ---- Memory -------------------------------------------------------------------------------------

// The operands and results of the calls of one rank, with guards, in one allocation.
struct Arena {
  struct Place {
    size_t in, out;  // of the first value
  };
  std::vector<uint8_t> bytes;
  std::vector<Place> places;

  Arena(std::span<const Case> calls, int rank) {
    size_t end = 0;
    auto reserve = [&](const Case& c, uint64_t offset) {
      const size_t begin = end + kAlignment;
      const size_t size = (offset + c.count) * size_of(c.dtype) + kGuard;
      end = begin + (size + kAlignment - 1) / kAlignment * kAlignment;
      return begin + offset * size_of(c.dtype);
    };
    for (const Case& c : calls) {
      const size_t in = reserve(c, c.in_offset);
      places.push_back({in, reserve(c, c.out_offset)});
    }
    bytes.assign(end + kAlignment, kGuardByte);
    for (size_t k = 0; k < calls.size(); ++k) fill(calls[k], k, rank);
  }

  // Writes the operand of a call, and the guard byte to all of its result.
  void fill(const Case& c, size_t call, int rank) {
    for (uint64_t i = 0; i < c.count; ++i) {
      const uint32_t bits = operand_bits(c, rank, i);
      std::memcpy(&bytes[places[call].in + i * size_of(c.dtype)], &bits, size_of(c.dtype));
    }
    std::memset(&bytes[places[call].out], kGuardByte, c.count * size_of(c.dtype));
  }

  uint32_t result(const Case& c, size_t call, uint64_t i) const {
    uint32_t bits = 0;
    std::memcpy(&bits, &bytes[places[call].out + i * size_of(c.dtype)], size_of(c.dtype));
    return bits;
  }

  // Values of the operand that were changed, and bytes of the guards.
  uint64_t damage(const Case& c, size_t call, int rank) const {
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < c.count; ++i) {
      const uint32_t bits = operand_bits(c, rank, i);
      wrong +=
          std::memcmp(&bytes[places[call].in + i * size_of(c.dtype)], &bits, size_of(c.dtype)) != 0;
    }
    for (const size_t begin : {places[call].in, places[call].out}) {
      const size_t end = begin + c.count * size_of(c.dtype);
      for (size_t k = 0; k < kGuard; ++k) {
        wrong += bytes[begin - 1 - k] != kGuardByte;
        wrong += bytes[end + k] != kGuardByte;
      }
    }
    return wrong;
  }
};

inline std::vector<Arena> arenas_of(std::span<const Case> calls, int world_size) {
  std::vector<Arena> arenas;
  for (int rank = 0; rank < world_size; ++rank) arenas.emplace_back(calls, rank);
  return arenas;
}

// Wrong values of a call: unlike the reference, or unlike those of rank 0, NaNs included.
inline uint64_t wrong_sums(const Case& c, size_t call, const std::vector<Arena>& arenas) {
  uint64_t wrong = 0;
  const int world_size = static_cast<int>(arenas.size());
  for (int rank = 0; rank < world_size; ++rank) {
    for (uint64_t i = 0; i < c.count; ++i) {
      const uint32_t got = arenas[rank].result(c, call, i);
      const bool same = got == arenas[0].result(c, call, i);
      wrong += !(same && (rank || as_expected(c, world_size, i, got)));
    }
    wrong += arenas[rank].damage(c, call, rank);
  }
  return wrong;
}

// ---- Sizes --------------------------------------------------------------------------------------

// Values of a message on both sides of every size at which an algorithm proceeds differently, up to
// its capacity: words of values, blocks, the grid, parts, tiles and their rounds.
inline std::vector<uint64_t> sizes(Algorithm algorithm, Dtype dtype, const Geometry& g,
                                   const BlockLimits& limits) {
  const uint64_t n = g.world_size;
  std::vector<uint64_t> words{1, kThreads};
  uint64_t capacity = std::numeric_limits<uint64_t>::max();
  const uint64_t grid = limits[static_cast<size_t>(algorithm)] * uint64_t{kThreads};
  if (algorithm == Algorithm::kLowLatency || algorithm == Algorithm::kOneShot) {
    capacity = algorithm == Algorithm::kLowLatency ? g.ll_words : g.slot_words;
    words.insert(words.end(), {grid, 2 * grid, capacity});
  } else if (algorithm == Algorithm::kTwoShot) {
    const uint64_t round =
        std::min<uint64_t>(limits[static_cast<size_t>(Route::kTiled)], kTileBlocks) * g.tile_words *
        n;
    words.insert(words.end(), {n, n * kThreads, n * grid, n * g.part_words()});
    for (const uint64_t rounds : {1, 2, 3, 4}) words.push_back(rounds * round);
  } else {
    const uint64_t round = g.multicast_words / n * n;
    words.insert(words.end(), {n, n * kThreads, round, 2 * round});
  }
  std::vector<uint64_t> found;
  const uint64_t each = values_per_word(dtype);
  for (const uint64_t size : words) {
    for (const uint64_t count : {size * each - 1, size * each, size * each + 1}) {
      if ((count + each - 1) / each <= capacity) found.push_back(count);
    }
  }
  return found;
}

}  // namespace jaxkv::collectives::cases
