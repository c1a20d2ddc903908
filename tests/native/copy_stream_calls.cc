// Ordering of an asynchronous copy between XLA's stream and the copy stream, with a runtime stub
// that records the calls.
//
// Arguments: the number of the call that fails, from 1 (0: none), and whether XLA's stream must
// wait for the copy. Prints one line per call, then the error, the number of copies started, and
// the runtime's last error after that and after a query of the copy, which is not complete.
#include <algorithm>
#include <cstdlib>
#include <string>

#include "stream_calls.h"
#include "transfer/copy_stream.h"

namespace {

const char* name_of(cudaStream_t stream) {
  constexpr const char* kNames[] = {"xla", "copy", "another"};
  return kNames[std::min<uintptr_t>(number_of(stream), 2)];
}

// `work_` is the first.
const char* name_of(cudaEvent_t event) {
  static std::string name;
  return (name = std::to_string(number_of(event))).c_str();
}

const char* name_of_launch(dim3) { return "gets the ticket"; }

}  // namespace

extern "C" {
cudaError_t cudaEventQuery(cudaEvent_t) { return last_error = cudaErrorNotReady; }
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** found, unsigned int,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *result = cudaDriverEntryPointSuccess;
  *found = result;  // not called
  return cudaSuccess;
}
}

int main(int, char** arguments) {
  using namespace jaxkv;
  using namespace jaxkv::transfer;
  failing = std::atoi(arguments[1]);
  const bool joined = std::atoi(arguments[2]);
  CopyStream copy_stream;
  uint32_t word = 0;
  if (copy_stream.create(0, &word).failure()) return 1;
  recorded = true;
  auto enqueue = [](const CopyStream& on, uint32_t first) {
    const cudaError_t status = call("%s copies from %u", name_of(on.stream()), first);
    (void)cudaGetLastError();
    return status == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal("no copy");
  };
  const auto error = copy_stream.start(nullptr, {nullptr, {}, {&word}, false}, 3, joined, enqueue);
  std::printf("%s\n%llu\n%d", error.message().c_str(),
              static_cast<unsigned long long>(copy_stream.started()), last_error);
  const bool ended = copy_stream.ended(1);
  std::printf(" %d\n", ended || last_error != cudaSuccess);
}
