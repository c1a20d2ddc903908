// Argument checks of an all-reduce call, shared by the CUDA and CPU handlers.
#include "collectives/all_reduce.h"

#include <cstring>

namespace jaxkv::collectives {

namespace ffi = xla::ffi;

ffi::ErrorOr<Task> resolve_task(int32_t device, ffi::AnyBuffer in, ffi::Result<ffi::AnyBuffer> out,
                                int64_t communicator, int64_t algorithm, int64_t signature) {
  auto refuse = [](std::string why) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("jaxkv all_reduce: " + why));
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
    return refuse("its program has no signature: jax.monitoring's event listeners were cleared");
  }
  if (!task.rank) {
    return refuse("device " + std::to_string(device) + " is not of the communicator's mesh");
  }
  if (task.message.dtype != ffi::F32 && task.message.dtype != ffi::BF16 &&
      task.message.dtype != ffi::F16) {
    return refuse("the dtype must be float32, bfloat16 or float16");
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
      capacity =
          geometry.tile_words ? UINT64_MAX : geometry.part_words() * geometry.world * sizeof(Word);
      break;
    case Algorithm::kMultimem:
      capacity = geometry.multicast_words ? UINT64_MAX : 0;
      break;
  }
  if (task.message.bytes > capacity || out->size_bytes() != in.size_bytes()) {
    return refuse(std::to_string(in.size_bytes()) + " bytes for a box of " +
                  std::to_string(capacity));
  }
  return task;
}

}  // namespace jaxkv::collectives
