// Checks of CUDA calls, of the runtime and of the driver API. An error names the call, its place in
// the sources, and the CUDA error.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "common/driver.h"
#include "xla/ffi/api/ffi.h"

namespace jaxkv {

inline std::string cuda_error_text(cudaError_t status) {
  return std::string(cudaGetErrorName(status)) + ": " + cudaGetErrorString(status);
}

inline std::string cuda_error_text(CUresult status) {
  using Describe = CUresult (*)(CUresult, const char**);
  const char* name = nullptr;
  if (const auto get_name = driver_function<Describe>("cuGetErrorName")) get_name(status, &name);
  return name ? name : "CUresult " + std::to_string(static_cast<int>(status));
}

// Clears the runtime's last error, so that a later, unrelated check does not report it again.
template <class Status>
[[gnu::cold, gnu::noinline]] std::string cuda_failure(const char* call, const char* file, int line,
                                                      Status status,
                                                      const std::string& context = {}) {
  (void)cudaGetLastError();
  return "jaxkv: " + context + (context.empty() ? "" : ": ") + call + " failed at " + file + ":" +
         std::to_string(line) + ": " + cuda_error_text(status);
}

}  // namespace jaxkv

#define JAXKV_RETURN_IF_CUDA_ERROR(call)                                                        \
  do {                                                                                          \
    if (const auto status = (call); static_cast<int>(status) != 0) {                            \
      return xla::ffi::Error::Internal(jaxkv::cuda_failure(#call, __FILE__, __LINE__, status)); \
    }                                                                                           \
  } while (false)

// Throws std::runtime_error, whose message begins with the optional second argument. That argument
// is evaluated only after an error.
#define JAXKV_CHECK_CUDA(call, ...)                                                           \
  do {                                                                                        \
    if (const auto status = (call); static_cast<int>(status) != 0) {                          \
      throw std::runtime_error(                                                               \
          jaxkv::cuda_failure(#call, __FILE__, __LINE__, status __VA_OPT__(, ) __VA_ARGS__)); \
    }                                                                                         \
  } while (false)
