// The handlers of `dma` with a driver stub that copies on the host: the driver calls, and the bytes
// written.
//
// Reads from stdin: whether the stream is under capture (2: the query fails), the status of
// cudaMemcpyBatchAsync and of cudaMemcpy2DAsync, bytes of each strided and of each dense array,
// number of strided and of dense arrays, buffers per segment for start_copy (0: synchronous copy),
// form of the ids (0: two operands, 1: one operand, 2: two operands, the second overwritten),
// length of the attribute and of each id list, the attribute, source ids, destination ids. Prints
// the calls, the number of rejected ids, the runtime's last error and the handler's error, one per
// line, then the bytes of all arrays. Initially byte i of array a is 101 i + 59 a.
#include <cstdio>
#include <cstring>
#include <iostream>

#include "common/error_ring.cc"
#include "ffi_operands.h"
#include "transfer/block_copy.cc"
#include "transfer/copy_engine.cu"
#include "transfer/host_ids.cc"

namespace {

int capturing = 0;
cudaError_t batch_status = cudaSuccess, rows_status = cudaSuccess, last_error = cudaSuccess;

}  // namespace

extern "C" {
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = capturing == 1 ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return last_error = capturing == 2 ? cudaErrorStreamCaptureImplicit : cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  std::printf("one ");
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind, cudaStream_t) {
  std::printf("rows-%zu ", height);
  for (size_t i = 0; i < height && rows_status == cudaSuccess; ++i) {
    std::memcpy(static_cast<char*>(to) + i * to_pitch,
                static_cast<const char*>(from) + i * from_pitch, width);
  }
  return last_error = rows_status;
}
cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const size_t* bytes,
                                 size_t count, cudaMemcpyAttributes*, size_t*, size_t,
                                 cudaStream_t) {
  std::printf("batch-%zu ", count);
  for (size_t i = 0; i < count && batch_status == cudaSuccess; ++i) {
    std::memcpy(to[i], from[i], bytes[i]);
  }
  return last_error = batch_status;
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheDriver"; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the driver"; }
}

namespace jaxkv::transfer {

// Stub for async_copy.cu, which is not linked.
ffi::Error start_copy(StartCall call, const BlockCopy& copy, SegmentedCopy segmented) {
  auto error = ffi::Error::Success();
  for (size_t s = 0; s < copy.dense.size() / call.segment_buffers && error.success(); ++s) {
    error = segmented.enqueue(nullptr, s);
    std::printf("segment-%zu ", s);
  }
  return error;
}

namespace {

std::vector<int64_t> read(size_t count) {
  std::vector<int64_t> numbers(count);
  for (int64_t& number : numbers) std::cin >> number;
  return numbers;
}

int run() {
  const auto setup = read(10);
  capturing = static_cast<int>(setup[0]);
  batch_status = rows_status = static_cast<cudaError_t>(setup[1]);
  const size_t num_strided = setup[4], num_arrays = setup[4] + setup[5];
  const auto attribute = read(setup[8]);
  const auto of_sources = read(setup[9]), of_destinations = read(setup[9]);
  auto of_both = of_sources;
  of_both.insert(of_both.end(), of_destinations.begin(), of_destinations.end());
  const bool together = setup[7] == 1;
  Ids sources(together ? of_both : of_sources), others(of_destinations);
  Ids& destinations = together ? sources : others;
  if (setup[7] == 2) destinations.words[0] ^= 1;

  // Contiguous, so that copies of adjacent arrays could be coalesced by mistake.
  std::vector<uint8_t> memory(setup[2] * setup[4] + setup[3] * setup[5]);
  uint8_t* array = memory.data();
  const bool to_dense = attribute[1];
  Arrays arrays;
  for (size_t a = 0; a < num_arrays; ++a) {
    const bool strided = a < num_strided;
    const size_t bytes = strided ? setup[2] : setup[3];
    for (size_t i = 0; i < bytes; ++i) array[i] = static_cast<uint8_t>(101 * i + 59 * a);
    arrays.add(array, bytes, strided != to_dense);
    array += bytes;
  }
  const XLA_FFI_Args all_args = arrays.args();
  const XLA_FFI_Rets all_rets = arrays.rets();
  const ffi::Buffer<ffi::S32> source_ids(&sources.operand.buffer);
  const ffi::Buffer<ffi::S32> destination_ids(&destinations.operand.buffer);
  const ffi::RemainingArgs copied(&all_args, 0);
  const ffi::RemainingRets written(&all_rets, 0);
  const CopyAttribute copy(attribute.data(), attribute.size());
  const auto error = setup[6] == 0
                         ? copy_by_dma(nullptr, source_ids, destination_ids, copied, written, copy)
                         : start_by_dma(nullptr, 0, {1}, source_ids, destination_ids, copied,
                                        source_ids, written, copy, setup[6], false, 1, false);
  unsigned long long refused = 0;
  for (const TakenErrors& taken : take_errors()) refused += taken.count;
  std::printf("\n%llu\n%d\n%s\n", refused, last_error, error.message().c_str());
  std::fwrite(memory.data(), 1, memory.size(), stdout);
  return 0;
}

}  // namespace
}  // namespace jaxkv::transfer

int main() { return jaxkv::transfer::run(); }
