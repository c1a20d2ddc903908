// Limits of the metadata of FlashInfer's paged wrappers in one kernel.
#pragma once

#include <cstdint>

namespace jaxkv::metadata {

// Rows of a batch: each thread block holds two starts per row in shared memory, 32 KiB.
inline constexpr uint32_t kMaxFlashInferRows = 4095;

}  // namespace jaxkv::metadata
