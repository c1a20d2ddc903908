// CUDA errors as FFI errors, with the call that failed.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "xla/ffi/api/ffi.h"

// Clears the last error, so that an innocent later check does not report it again.
#define JAXKV_RETURN_IF_CUDA_ERROR(call)                                          \
  do {                                                                            \
    if (const cudaError_t status = (call); status != cudaSuccess) {               \
      (void)cudaGetLastError();                                                   \
      return xla::ffi::Error::Internal(std::string("jaxkv: " #call " failed: ") + \
                                       cudaGetErrorName(status) + ": " +          \
                                       cudaGetErrorString(status));               \
    }                                                                             \
  } while (false)
