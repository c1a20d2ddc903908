// Launch parameters of the copy kernel for a GPU of any size, with a runtime stub that launches
// nothing.
//
// Arguments: shared memory limit per thread block in bytes, static shared memory of each kernel,
// then of a copy: whether it is a load, SMs, number of ids, whether the ids are already checked,
// bytes of a block, number of buffers. Prints the thread blocks and the dynamic shared memory of
// each launch, and the error in the last line.
#include <cstdio>
#include <cstdlib>

#include "kernel_registration.h"
#include "transfer/copy_kernel.h"

namespace {

int max_shared = 0, static_shared = 0;

}  // namespace

namespace jaxkv {

// Stub for error_ring.cu, which is not linked.
xla::ffi::Error prepare_rings(int32_t, Scope) { return xla::ffi::Error::Success(); }

namespace transfer {
// Stub for copy_group.cu, which is not linked.
std::vector<void*> group_kernels() { return {}; }
}  // namespace transfer

}  // namespace jaxkv

extern "C" {
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute == cudaDevAttrMultiProcessorCount) {
    *value = 132;
  } else if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin) {
    *value = max_shared;
  } else {
    return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  attributes->sharedSizeBytes = static_shared;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int value) {
  return value <= max_shared - static_shared ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaLaunchKernel(const void*, dim3 grid, dim3, void**, size_t shared, cudaStream_t) {
  std::printf("%u %zu\n", grid.x, shared);
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheRuntime"; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the runtime"; }
}

int main(int, char** arguments) {
  using namespace jaxkv;
  using namespace jaxkv::transfer;
  auto next = [&] { return std::atoi(*++arguments); };
  max_shared = next();
  static_shared = next();
  const bool to_dense = next();
  const int num_sms = next();
  const size_t num_ids = next();
  const bool checked = next();
  const int64_t block_bytes = next();
  const size_t num_buffers = next();

  // Never dereferenced.
  std::vector<std::byte*> arrays(num_buffers, reinterpret_cast<std::byte*>(1 << 20));
  const BlockCopy copy{
      to_dense,
      num_sms,
      {block_bytes, block_bytes, block_bytes, 1, 1, 0, 0, block_bytes, 1 << 20, 1 << 20},
      arrays,
      arrays};
  std::vector<int32_t> ids(num_ids);
  std::vector<BlockPair> pairs(num_ids);
  const IdLists lists{{ids, 0, num_ids}, {ids, 0, num_ids}, 1 << 20, 1 << 20};
  int32_t count = 0;
  auto error = prepare_copy_kernel(0);
  if (error.success()) {
    error = checked ? launch_copy(nullptr, copy, PairList{&count, pairs.data(), num_ids})
                    : launch_copy(nullptr, copy, lists, nullptr);
  }
  std::printf("%s\n", error.message().c_str());
}
