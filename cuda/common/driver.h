// CUDA driver functions, looked up at run time: the extension must load on machines without a
// driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace jaxkv {

// The version of the function as of CUDA 12.1; null if the driver does not provide it.
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

// The same; throws std::runtime_error if the driver does not provide it.
template <class Function>
Function require_driver_function(const char* name) {
  if (const auto found = driver_function<Function>(name)) return found;
  throw std::runtime_error(std::string("jaxkv: the CUDA driver does not provide ") + name +
                           "; driver 580 or later is required");
}

}  // namespace jaxkv
