// The kernel of FlashInfer's metadata on the host, as a library for
// tests/metadata/test_flashinfer_kernel.py.
#include "cuda_on_host/threads.h"

#undef __shared__
#define __shared__ static  // of the one block that runs at a time

#include "metadata/flashinfer.cuh"

using namespace jaxkv::metadata;

// `numbers`: thread blocks, descending, rows, columns, tokens, maximum of pages, block size,
// threshold of decodes. `arrays`: the operands of the handler, then its results.
extern "C" void run(const int64_t* n, int32_t** arrays) {
  const auto number = [n](int i) { return static_cast<uint32_t>(n[i]); };
  const FlashInferSizes sizes{number(2),
                              number(3),
                              number(4),
                              number(5),
                              static_cast<int32_t>(n[6]),
                              static_cast<int32_t>(n[7])};
  const FlashInferParams p = flash_infer_params(sizes, arrays, arrays + kFlashInferOperands);
  gridDim.x = number(0);
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
    std::vector<int32_t> shared(flash_infer_shared_words(p.rows), -77);
    simulated::run_block(kFlashInferThreads, n[1], [&] { build_flash_infer(p, shared.data()); });
  }
}
