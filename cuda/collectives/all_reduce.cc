// Argument checks of an all-reduce call, shared by the CUDA and CPU handlers.
#include "collectives/all_reduce.h"

#include <cstring>

namespace jaxkv::collectives {

namespace ffi = xla::ffi;

ffi::ErrorOr<Task> resolve_task(int32_t device, ffi::AnyBuffer in, ffi::Result<ffi::AnyBuffer> out,
                                int64_t communicator, int64_t algorithm, int64_t signature) {
  auto invalid = [](const std::string& message) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("jaxkv all_reduce: " + message));
  };
  const auto found = usable_communicator(communicator);
  if (!found.has_value()) return ffi::Unexpected(found.error());
  Task task{.communicator = *found,
            .rank = (*found)->on_device(device),
            .message = {static_cast<const char*>(in.untyped_data()),
                        static_cast<char*>(out->untyped_data()), in.size_bytes(),
                        static_cast<Algorithm>(algorithm), in.element_type(),
                        static_cast<uint64_t>(signature) % kSignatures}};
  const Geometry& geometry = task.communicator->geometry();
  if (!signature) {  // 0 would match any other program without a signature
    return invalid(
        "the program has no signature, because the event listeners of jax.monitoring were cleared; "
        "keep them and compile the program again");
  }
  if (!task.rank) {
    return invalid("device " + std::to_string(device) +
                   " is not in the mesh of the SymmetricMemory");
  }
  if (task.message.dtype != ffi::F32 && task.message.dtype != ffi::BF16 &&
      task.message.dtype != ffi::F16) {
    return invalid("dtype must be float32, bfloat16 or float16");
  }
  uint64_t capacity = 0;
  switch (task.message.algorithm) {
    case Algorithm::kLowLatency:
      capacity = geometry.ll_words * sizeof(Word);
      break;
    case Algorithm::kOneShot:
      capacity = geometry.slot_words * sizeof(Word);
      break;
    case Algorithm::kTwoShot:
      capacity = geometry.tile_words ? UINT64_MAX
                                     : geometry.part_words() * geometry.world_size * sizeof(Word);
      break;
    case Algorithm::kMultimem:
      capacity = geometry.multicast_words ? UINT64_MAX : 0;
      break;
  }
  if (out->size_bytes() != in.size_bytes()) {
    return invalid("operand of " + std::to_string(in.size_bytes()) + " bytes, result of " +
                   std::to_string(out->size_bytes()) + " bytes: must be equal");
  }
  if (task.message.bytes > capacity) {
    return invalid("operand of " + std::to_string(in.size_bytes()) +
                   " bytes exceeds the receive buffer of " + std::to_string(capacity) +
                   " bytes; select another implementation");
  }
  return task;
}

}  // namespace jaxkv::collectives
