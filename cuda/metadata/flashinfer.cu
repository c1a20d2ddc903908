// FFI handler of the metadata of FlashInfer's paged wrappers.
#include <algorithm>
#include <string>

#include "common/cuda_check.h"
#include "metadata/flashinfer.cuh"
#include "xla/ffi/api/ffi.h"

namespace jaxkv::metadata {
namespace {

namespace ffi = xla::ffi;
using Int32s = ffi::Buffer<ffi::S32>;

constexpr uint32_t kItemsPerThread = 2;
constexpr uint32_t kMaxBlocks = 256;

__global__ void __launch_bounds__(kFlashInferThreads)
    build_metadata(const __grid_constant__ FlashInferParams p) {
  extern __shared__ int32_t shared[];
  build_flash_infer(p, shared);
}

ffi::Error prepare() {
  cudaFuncAttributes loaded;
  JAXKV_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&loaded, build_metadata));
  return ffi::Error::Success();
}

ffi::Error invalid(const std::string& message) {
  return ffi::Error::InvalidArgument("jaxkv flashinfer metadata: " + message);
}

ffi::Error build(cudaStream_t stream, Int32s query_start_loc, Int32s seq_lens, Int32s block_table,
                 Int32s num_reqs, Int32s num_tokens, ffi::RemainingRets rets, int64_t block_size,
                 int64_t decode_threshold) {
  const size_t rows = seq_lens.element_count();
  if (rows == 0 || rows > kMaxFlashInferRows || query_start_loc.element_count() != rows + 1 ||
      block_table.element_count() == 0 || block_table.element_count() % rows ||
      num_reqs.element_count() != 1 || num_tokens.element_count() != 1 || block_size < 1) {
    return invalid(std::to_string(rows) + " rows, at most " + std::to_string(kMaxFlashInferRows) +
                   ", or other operands of another size");
  }
  if (rets.size() != kFlashInferResults) return invalid(std::to_string(rets.size()) + " results");
  int32_t* results[kFlashInferResults];
  size_t sizes[kFlashInferResults];
  for (size_t i = 0; i < kFlashInferResults; ++i) {
    auto result = rets.get<Int32s>(i);
    if (!result.has_value()) return result.error();
    results[i] = (*result)->typed_data();
    sizes[i] = (*result)->element_count();
  }
  const size_t wanted[kFlashInferResults - 2] = {1,        1,    1,        1,        1,   rows + 1,
                                                 rows + 1, rows, rows + 1, rows + 1, rows};
  if (!std::equal(std::begin(wanted), std::end(wanted), sizes + 2)) {
    return invalid("a result of another size");
  }
  const int32_t* operands[kFlashInferOperands] = {query_start_loc.typed_data(),
                                                  seq_lens.typed_data(), block_table.typed_data(),
                                                  num_reqs.typed_data(), num_tokens.typed_data()};
  const FlashInferSizes of_call{
      .rows = static_cast<uint32_t>(rows),
      .columns = static_cast<uint32_t>(block_table.element_count() / rows),
      .tokens = static_cast<uint32_t>(sizes[0]),
      .max_pages = static_cast<uint32_t>(sizes[1]),
      .block_size = static_cast<int32_t>(block_size),
      .decode_threshold = static_cast<int32_t>(decode_threshold),
  };
  const FlashInferParams p = flash_infer_params(of_call, operands, results);
  const size_t items = std::max({sizes[0], sizes[1], rows + 1});
  const size_t per_block = kFlashInferThreads * kItemsPerThread;
  const auto blocks =
      static_cast<uint32_t>(std::min<size_t>(kMaxBlocks, (items + per_block - 1) / per_block));
  const size_t shared_bytes = flash_infer_shared_words(p.rows) * sizeof(int32_t);
  build_metadata<<<blocks, kFlashInferThreads, shared_bytes, stream>>>(p);
  JAXKV_RETURN_IF_CUDA_ERROR(cudaGetLastError());
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(PrepareFlashInfer, prepare, ffi::Ffi::BindInitialize());

XLA_FFI_DEFINE_HANDLER_SYMBOL(FlashInferKernel, build,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Int32s>()
                                  .Arg<Int32s>()
                                  .Arg<Int32s>()
                                  .Arg<Int32s>()
                                  .Arg<Int32s>()
                                  .RemainingRets()
                                  .Attr<int64_t>("block_size")
                                  .Attr<int64_t>("decode_threshold"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxkv::metadata
