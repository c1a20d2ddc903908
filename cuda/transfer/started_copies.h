// Asynchronous copies as a whole; free of CUDA headers.
#pragma once

#include <cstdint>
#include <vector>

struct CUstream_st;

namespace jaxkv::transfer {

// The number of copies enqueued entirely on each copy stream of each device, in a fixed order; and
// whether all copies counted in such a list have completed. A copy of a program whose handle leaves
// it is among them once the program has been enqueued.
std::vector<uint64_t> started_copies();
bool copies_ended(const std::vector<uint64_t>& started);

// XLA's stream, if it is not under capture, waits for all copies that are enqueued on the device.
void join_copies(int32_t device, CUstream_st* xla_stream);

}  // namespace jaxkv::transfer
