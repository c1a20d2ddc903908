// Tickets in device memory, written by a kernel.
#include <algorithm>
#include <span>

#include "common/cuda_check.h"
#include "transfer/copy_stream.h"

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

__global__ void ticket_kernel(const __grid_constant__ WriteTicketParams p) {
  if (threadIdx.x == 0) {
    p.ticket->copy_stream = p.copy_stream;
    p.ticket->operation = p.operation;
    p.ticket->first = p.first;
  }
  for (uint32_t i = threadIdx.x; i < p.count; i += kWarp) {
    p.ticket->written[p.begin + i] = p.written[i];
  }
}

// Moves the ticket of a store to device memory, where waits read it.
ffi::Error move_ticket(cudaStream_t stream, ffi::Buffer<ffi::S32> on_host,
                       ffi::ResultBuffer<ffi::S32> on_device) {
  const size_t arrays = arrays_of_ticket(on_host.size_bytes());
  if (arrays == 0 || on_host.size_bytes() != on_device->size_bytes()) {
    return ffi::Error::InvalidArgument("jaxkv move_ticket: tickets of unequal size");
  }
  const auto* ticket = static_cast<const Ticket*>(on_host.untyped_data());
  return write_ticket(stream, static_cast<Ticket*>(on_device->untyped_data()), *ticket,
                      {ticket->written, arrays});
}

}  // namespace

ffi::Error write_ticket(cudaStream_t stream, Ticket* ticket, const Ticket& values,
                        std::span<const void* const> written) {
  WriteTicketParams p{ticket, values.copy_stream, values.operation, values.first, 0, 0, {}};
  for (size_t i = 0; i < written.size(); i += p.count) {
    p.begin = static_cast<uint32_t>(i);
    p.count = static_cast<uint32_t>(std::min<size_t>(kLaunchArrays, written.size() - i));
    std::copy_n(written.begin() + i, p.count, p.written);
    ticket_kernel<<<1, kWarp, 0, stream>>>(p);
    JAXKV_RETURN_IF_CUDA_ERROR(cudaGetLastError());
  }
  return ffi::Error::Success();
}

ffi::Error prepare_ticket_kernel() {
  cudaFuncAttributes attributes;
  JAXKV_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&attributes, ticket_kernel));
  return ffi::Error::Success();
}

// No command-buffer trait: the host reads the ticket when the call is enqueued.
XLA_FFI_DEFINE_HANDLER_SYMBOL(MoveTicketKernel, move_ticket,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>());

}  // namespace jaxkv::transfer
