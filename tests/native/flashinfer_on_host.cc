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
  int32_t** const results = arrays + 5;
  const FlashInferParams p{
      .query_start_loc = arrays[0],
      .seq_lens = arrays[1],
      .block_table = arrays[2],
      .num_reqs = arrays[3],
      .num_tokens = arrays[4],
      .rows = number(2),
      .columns = number(3),
      .tokens = number(4),
      .max_pages = number(5),
      .block_size = static_cast<int32_t>(n[6]),
      .decode_threshold = static_cast<int32_t>(n[7]),
      .slots = results[0],
      .pages = results[1],
      .num_decodes = results[2],
      .num_prefills = results[3],
      .num_decode_tokens = results[4],
      .num_prefill_tokens = results[5],
      .total_pages = results[6],
      .decode = {results[7], results[8], results[9]},
      .prefill = {results[10], results[11], results[12]},
  };
  gridDim.x = number(0);
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
    std::vector<int32_t> shared(flash_infer_shared_words(p.rows), -77);
    simulated::run_block(kFlashInferThreads, n[1], [&] { build_flash_infer(p, shared.data()); });
  }
}
