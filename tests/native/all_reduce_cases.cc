// Whether the comparison of all_reduce_cases.h finds a wrong result: one bit of a value, a byte
// after the results, one of an operand, or a NaN that differs between ranks.
#include "all_reduce_cases.h"

#include <cstdio>

namespace jaxkv::collectives::cases {
namespace {

constexpr int kWrong = 4;

bool found(Dtype dtype, int wrong) {
  constexpr int kRanks = 4;
  const Case c{Algorithm::kOneShot, dtype, 77, Values::kSentinels, 0, 1, 5};
  auto arenas = arenas_of(std::span(&c, 1), kRanks);
  uint64_t nan = c.count;
  for (uint64_t i = 0; i < c.count; ++i) {
    float sum = 0;
    for (int rank = 0; rank < kRanks; ++rank) sum += value_of(dtype, operand_bits(c, rank, i));
    if (std::isnan(sum)) nan = i;
    const uint32_t bits = std::isnan(sum) ? (dtype == Dtype::F32 ? 0x7FC00000 : 0x7FFF)
                          : sum == 0      ? 0
                                          : bits_of(dtype, sum);
    for (Arena& arena : arenas) {
      std::memcpy(&arena.bytes[arena.places[0].out + i * size_of(dtype)], &bits, size_of(dtype));
    }
  }
  const uint64_t before = wrong_sums(c, 0, arenas);
  Arena& last = arenas[kRanks - 1];
  const auto [in, out] = last.places[0];
  uint8_t* const changed[] = {&last.bytes[out], &last.bytes[out + c.count * size_of(dtype)],
                              &last.bytes[in], &last.bytes[out + nan * size_of(dtype)]};
  *changed[wrong] ^= 1;
  const uint64_t after = wrong_sums(c, 0, arenas);
  std::printf("dtype %d, result %d: %lu wrong before, %lu after\n", static_cast<int>(dtype), wrong,
              before, after);
  return nan < c.count && before == 0 && after == 1;
}

}  // namespace
}  // namespace jaxkv::collectives::cases

int main() {
  using namespace jaxkv::collectives::cases;
  bool all = true;
  for (const Dtype dtype : {Dtype::F32, Dtype::BF16, Dtype::F16}) {
    for (int wrong = 0; wrong < kWrong; ++wrong) all &= found(dtype, wrong);
  }
  return all ? 0 : 1;
}
