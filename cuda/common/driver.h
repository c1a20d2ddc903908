// Functions of the CUDA driver, asked for at run time: the extension must load where there is none.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace jaxkv {

// In the form that it has had since CUDA 12.1; null if this driver does not have it.
template <class Function>
Function driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  constexpr unsigned int kVersion = 12010;
  if (cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &result) !=
          cudaSuccess ||
      result != cudaDriverEntryPointSuccess) {
    (void)cudaGetLastError();
    return nullptr;
  }
  return reinterpret_cast<Function>(found);
}

}  // namespace jaxkv
