// Error rings that are read while a device writes them.
//
// Arguments: "claim" counts an entry, as a kernel does before it writes it; a number writes the
// entry of that index (from 0), with the index as id. Both apply to the kind named last:
// "page_index" (initially), "transfer" or "bound". "take" prints for each kind with errors its
// number, the device, the number of entries taken and the ids of the known ones, and ends the line.
// "default" (initially) and "other" select the scope of the following steps.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "common/error_ring.cc"

int main(int count, char** arguments) {
  using namespace jaxkv;
  ErrorRings of_default{}, of_other{};
  const Scope other = register_scope("other");
  register_rings(&of_default, 3);
  register_rings(&of_other, 3, other);
  Scope scope = Scope::kDefault;
  ErrorCode code = ErrorCode::kDuplicate;
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    ErrorRings& rings = scope == other ? of_other : of_default;
    if (argument == "default" || argument == "other") {
      scope = argument == "other" ? other : Scope::kDefault;
    } else if (argument == "page_index") {
      code = ErrorCode::kDuplicate;
    } else if (argument == "transfer") {
      code = ErrorCode::kWaitTimeout;
    } else if (argument == "bound") {
      code = ErrorCode::kBoundExceeded;
    } else if (argument == "claim") {
      ++rings.of(code).count;
    } else if (argument == "take") {
      for (const TakenErrors& taken : take_errors(scope)) {
        std::printf("%d %d %llu", static_cast<int>(taken.kind), taken.device,
                    static_cast<unsigned long long>(taken.count));
        for (const auto& entry : taken.details) std::printf(" %d", entry.id);
        std::printf(";");
      }
      std::printf("\n");
    } else {
      const int slot = std::atoi(argument.c_str());
      ErrorRing& ring = rings.of(code);
      ring.entries[slot % ErrorRing::kEntries] = {Fault(code).word, 0, slot, 0,
                                                  static_cast<unsigned long long>(slot) + 1};
      ++ring.written;
    }
  }
}
