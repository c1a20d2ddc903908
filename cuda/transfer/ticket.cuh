// Tickets in device memory, written by a kernel.
#pragma once

#include <algorithm>
#include <span>

#include "common/cuda_check.h"
#include "transfer/ticket.h"

namespace jaxkv::transfer {
namespace {

constexpr int kWarp = 32;

struct WriteTicketParams {
  Ticket* ticket;
  uint16_t copy_stream, operation;
  uint32_t first;
  uint32_t begin, count;  // of the written arrays
  const void* written[kLaunchArrays];
};

__global__ void write_ticket(const __grid_constant__ WriteTicketParams p) {
  if (threadIdx.x == 0) {
    p.ticket->copy_stream = p.copy_stream;
    p.ticket->operation = p.operation;
    p.ticket->first = p.first;
  }
  for (uint32_t i = threadIdx.x; i < p.count; i += kWarp) {
    p.ticket->written[p.begin + i] = p.written[i];
  }
}

ffi::Error enqueue_ticket_write(cudaStream_t stream, Ticket* ticket, const Ticket& values,
                                std::span<const void* const> written) {
  WriteTicketParams p{ticket, values.copy_stream, values.operation, values.first, 0, 0, {}};
  for (size_t i = 0; i < written.size(); i += p.count) {
    p.begin = static_cast<uint32_t>(i);
    p.count = static_cast<uint32_t>(std::min<size_t>(kLaunchArrays, written.size() - i));
    std::copy_n(written.begin() + i, p.count, p.written);
    write_ticket<<<1, kWarp, 0, stream>>>(p);
    JAXKV_RETURN_IF_CUDA_ERROR(cudaGetLastError());
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxkv::transfer
