// The ring of refused ids, read while a device writes it.
//
// Arguments: "claim" counts an entry, as a kernel does before it writes it; a number writes that
// entry (0 is the first), with its own number as id; "take" prints how many entries were taken and
// the ids of those that are known.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "common/error_ring.cc"

int main(int count, char** arguments) {
  using namespace jaxkv;
  ErrorRing ring{};
  register_ring(&ring);
  for (int i = 1; i < count; ++i) {
    if (!std::strcmp(arguments[i], "claim")) {
      ++ring.count;
    } else if (!std::strcmp(arguments[i], "take")) {
      const TakenErrors taken = take_errors();
      std::printf("%llu", static_cast<unsigned long long>(taken.count));
      for (const auto& entry : taken.details) std::printf(" %d", entry.id);
      std::printf("\n");
    } else {
      const int slot = std::atoi(arguments[i]);
      ring.entries[slot % ErrorRing::kEntries] = {ErrorCode::kDuplicate, 0, slot, 0,
                                                  static_cast<unsigned long long>(slot) + 1};
      ++ring.written;
    }
  }
}
