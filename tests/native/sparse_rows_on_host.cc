// The kernels of sparse rows on the host, as a library for tests/sparse/test_kernels.py.
#include "cuda_on_host/threads.h"
#include "sparse/copy_rows.cuh"
#include "sparse/look_up.cuh"

namespace {

using namespace jaxkv::sparse;

template <bool kAppend>
void look_up(const RowBatch& batch, uint32_t threads, bool descending) {
  const LookUpParams params{
      batch, {batch.slots, batch.num_ids, static_cast<int32_t>(threads)}, nullptr};
  std::vector<uint32_t> memory(params.size.bytes() / 4 + 1, 0xdeadbeef);
  uint32_t sums[2][kLanes];
  for (int32_t request = 0; request < batch.num_requests; ++request) {
    blockIdx.x = request;
    simulated::run_block(threads, descending, [&] {
      if (params.size.is_small()) {
        LookUp<kAppend, Small>(params, memory.data(), sums).run();
      } else {
        LookUp<kAppend, Large>(params, memory.data(), sums).run();
      }
    });
  }
}

}  // namespace

// `numbers`: append, threads, descending, blocks of the copy, then the sizes of the batch and the
// addresses; `arrays` in the order of RowBatch and RowAddresses. Returns the number of faults.
extern "C" int64_t run(const int64_t* n, void** arrays) {
  const bool append = n[0], descending = n[2];
  const auto threads = static_cast<uint32_t>(n[1]);
  auto next = [arrays]() mutable { return *arrays++; };
  RowBatch b;
  b.append = append;
  b.num_requests = n[4], b.num_ids = n[5], b.slots = n[6], b.max_length = n[7];
  b.num_columns = n[8], b.num_pages = n[9], b.page_size = Divisor(n[10]), b.first_row = n[11];
  b.ids = static_cast<int32_t*>(next());
  b.lengths = static_cast<int32_t*>(next());
  b.block_table = static_cast<int32_t*>(next());
  b.rows = static_cast<int32_t*>(next());
  b.moves = static_cast<RowMove*>(next());
  b.counts = static_cast<int32_t*>(next());
  b.positions = static_cast<int32_t*>(next());
  b.used = static_cast<int32_t*>(next());
  b.slot_of = static_cast<int16_t*>(next());
  b.clock = static_cast<int32_t*>(next());
  RowAddresses a;
  a.pool = static_cast<std::byte*>(next());
  a.hot = static_cast<std::byte*>(next());
  a.added = static_cast<std::byte*>(next());
  a.page_size = b.page_size, a.row_bytes = n[12], a.page_stride = n[13], a.token_stride = n[14];
  jaxkv::faults = 0;
  append ? look_up<true>(b, threads, descending) : look_up<false>(b, threads, descending);
  const CopyParams copy{a,
                        b.moves,
                        b.counts,
                        static_cast<uint32_t>(b.num_requests),
                        Divisor(b.num_ids),
                        static_cast<uint32_t>(b.slots),
                        Divisor(a.row_bytes / kWordBytes),
                        Divisor(lines_of_row(a))};
  std::vector<uint32_t> prefix(b.num_requests + 1), of_warps(kCopyThreads / 32);
  gridDim.x = n[3];
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
    simulated::run_block(64, descending, [&] {
      if (!append) return copy_missing_rows(copy, prefix.data(), of_warps.data());
      copy_added_rows<false>(copy);
      copy_added_rows<true>(copy);
    });
  }
  return jaxkv::faults;
}
