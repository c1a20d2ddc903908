// Host calls for a CUDA device, outside of any step. Free of CUDA headers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

struct CUctx_st;
struct CUstream_st;

namespace jaxkv {

inline constexpr int kMaxDevices = 64;

// Makes a device current for the calling thread, and restores the previous context at the end, also
// if a check throws.
class DeviceGuard {
 public:
  explicit DeviceGuard(int ordinal);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  CUctx_st* previous_ = nullptr;
};

// The streams on which work of ours runs: that of XLA's programs, which a call replaces, and up to
// kMaxOwnStreams of our own, which exist until the process ends. In any thread.
inline constexpr int kMaxOwnStreams = 8;
void set_program_stream(int ordinal, CUstream_st* stream);
void add_own_stream(int ordinal, CUstream_st* stream);

// Blocks until all work of these streams that is enqueued now is complete. (cudaDeviceSynchronize
// would invalidate the CUDA graph that another thread may be capturing, in any capture mode.)
// Throws std::runtime_error with CUDA's error message, as pci_address does.
void synchronize_device(int ordinal);
std::string pci_address(int ordinal);

}  // namespace jaxkv
