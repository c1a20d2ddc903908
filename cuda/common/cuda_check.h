// CUDA errors as FFI errors that name the failed call.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "xla/ffi/api/ffi.h"

// Clears the last error, so that a later, unrelated check does not report it again.
#define JAXKV_RETURN_IF_CUDA_ERROR(call)                                          \
  do {                                                                            \
    if (const cudaError_t status = (call); status != cudaSuccess) {               \
      (void)cudaGetLastError();                                                   \
      return xla::ffi::Error::Internal(std::string("jaxkv: " #call " failed: ") + \
                                       cudaGetErrorName(status) + ": " +          \
                                       cudaGetErrorString(status));               \
    }                                                                             \
  } while (false)
