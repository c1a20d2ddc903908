// The kernel that waits for an asynchronous copy.
#include <string>

#include "common/alias_check.h"
#include "common/cuda_check.h"
#include "common/error_ring.cuh"
#include "common/error_scope.h"
#include "common/ptx.cuh"
#include "transfer/async_copy.h"
#include "transfer/ticket.h"

namespace jaxkv::transfer {
namespace {

constexpr int kWarp = 32;

struct WaitParams {
  const Ticket* ticket;
  Ticket* next_ticket;  // null if no wait follows
  uint32_t ticket_arrays;
  const uint32_t* copy_stream_words;
  int32_t segment;                // -1: no wait, or ...
  const int32_t* traced_segment;  // ... a segment known on the device, if not null,
  int32_t last_segment;           // clamped to [0, last_segment], as XLA clamps indices
  uint64_t timeout_ns;
  ErrorRings* errors;
  uint32_t count;
  const void* arrays[kLaunchArrays];
  uint32_t places[kLaunchArrays];  // indices in the written arrays
};

// Checks that the arrays are those that the copy writes, and writes the next ticket, which may
// replace the ticket.
__device__ void pass_on_ticket(const WaitParams& p) {
  const Ticket values{p.ticket->copy_stream, p.ticket->operation, p.ticket->first};
  for (uint32_t i = threadIdx.x; i < p.count; i += kWarp) {
    const void* written = p.ticket->written[p.places[i]];
    if (written && written != p.arrays[i]) {
      const auto operation = static_cast<Operation>(values.operation);
      record_error(p.errors, {ErrorCode::kCopiedBeforeWait, operation}, p.segment, p.places[i], 0);
    }
  }
  if (!p.next_ticket) return;
  for (uint32_t i = threadIdx.x; i < p.ticket_arrays; i += kWarp) {
    p.next_ticket->written[i] = p.ticket->written[i];
  }
  if (threadIdx.x != 0) return;
  p.next_ticket->copy_stream = values.copy_stream;
  p.next_ticket->operation = values.operation;
  p.next_ticket->first = values.first;
}

// Each lane reads the counter of one copy stream together with the ticket, which names the copy
// stream: the latency of one load instead of two. The lane of that copy stream waits.
__device__ void wait_for_segment(const WaitParams& p) {
  const uint32_t copy_stream = threadIdx.x % kWarp;
  if (copy_stream >= kNumCopyStreams) return;
  const uint32_t* counter = p.copy_stream_words + copy_stream * kCopyStreamWords;
  const uint32_t ticket_copy_stream = p.ticket->copy_stream, first = p.ticket->first;
  const auto operation = static_cast<Operation>(p.ticket->operation);
  const int32_t segment =
      p.traced_segment ? max(0, min(*p.traced_segment, p.last_segment)) : p.segment;
  uint32_t seen = ptx::load_acquire_sys(counter);
  if (segment < 0 || copy_stream != ticket_copy_stream % kNumCopyStreams) return;
  const uint32_t expected = first + static_cast<uint32_t>(segment);
  const auto arrived = [&] { return static_cast<int32_t>(seen - expected) >= 0; };  // wrapping
  if (arrived()) return;
  const uint64_t deadline = ptx::globaltimer_ns() + p.timeout_ns;
  while (!arrived()) {
    if (ptx::globaltimer_ns() > deadline) {
      record_error(p.errors, {ErrorCode::kWaitTimeout, operation}, segment,
                   static_cast<int32_t>(expected), static_cast<int32_t>(seen));
      return;
    }
    __nanosleep(100);
    seen = ptx::load_acquire_sys(counter);
  }
}

// A warp for each part, so that neither waits for the loads of the other.
__global__ void wait_for_copy(const __grid_constant__ WaitParams p) {
  if (threadIdx.x < kWarp) {
    pass_on_ticket(p);
  } else {
    wait_for_segment(p);
  }
}

ffi::Error wait(cudaStream_t stream, int32_t device, ffi::Buffer<ffi::S32> ticket,
                ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes) {
  const auto segment = attributes.get<int64_t>("segment");
  const auto timeout_ns = attributes.get<int64_t>("timeout_ns");
  const auto first_array = attributes.get<int64_t>("first_array");
  const auto places = attributes.get<ffi::Span<const int64_t>>("places");
  const auto has_traced_segment = attributes.get<bool>("has_traced_segment");
  const auto last = attributes.get<int64_t>("last");
  if (!segment.has_value() || !timeout_ns.has_value() || !first_array.has_value() ||
      !places.has_value() || !has_traced_segment.has_value() || !last.has_value() ||
      *first_array < 0 || *first_array > 1 || args.size() + *first_array < rets.size() ||
      (places->size() && places->size() + *first_array != rets.size())) {
    return ffi::Error::InvalidArgument("jaxkv wait_copy: missing or invalid attribute");
  }
  const size_t first_operand = args.size() + *first_array - rets.size();
  if (auto error = check_aliases(args, first_operand, rets, *first_array); error.failure()) {
    return error;
  }
  WaitParams p{
      .ticket = static_cast<const Ticket*>(ticket.untyped_data()),
      .next_ticket = nullptr,
      .ticket_arrays = static_cast<uint32_t>(arrays_of_ticket(ticket.size_bytes())),
      .copy_stream_words = copy_stream_words(device),
      .segment = static_cast<int32_t>(*segment),
      .traced_segment = nullptr,
      .last_segment = 0,
      .timeout_ns = static_cast<uint64_t>(*timeout_ns),
      .errors = device_rings(device, scope_of_call(attributes)),
      .count = 0,
      .arrays = {},
      .places = {},
  };
  if (*first_array == 1) {
    auto next = rets.get<ffi::AnyBuffer>(0);
    if (!next.has_value()) return next.error();
    if ((*next)->size_bytes() != ticket.size_bytes()) {
      return ffi::Error::InvalidArgument(
          "jaxkv wait_copy: ticket of " + std::to_string(ticket.size_bytes()) +
          " bytes, but the next ticket has " + std::to_string((*next)->size_bytes()));
    }
    p.next_ticket = static_cast<Ticket*>((*next)->untyped_data());
  }
  // A segment >= 0 replaces the traced one if the wait has to cover more.
  if (*has_traced_segment && *segment < 0) {
    auto traced = args.get<ffi::Buffer<ffi::S32>>(first_operand - 1);
    if (!traced.has_value()) return traced.error();
    p.traced_segment = traced->typed_data();
    p.last_segment = static_cast<int32_t>(*last);
  }
  size_t i = 0;
  do {  // also without arrays
    for (p.count = 0; p.count < kLaunchArrays && i < places->size(); ++i, ++p.count) {
      auto array = rets.get<ffi::AnyBuffer>(*first_array + i);
      if (!array.has_value()) return array.error();
      const int64_t place = places->begin()[i];
      if (place < 0 || place >= p.ticket_arrays) {
        return ffi::Error::InvalidArgument("jaxkv wait_copy: array index " + std::to_string(place) +
                                           " is outside [0, " + std::to_string(p.ticket_arrays) +
                                           ") of the ticket");
      }
      p.arrays[p.count] = (*array)->untyped_data();
      p.places[p.count] = static_cast<uint32_t>(place);
    }
    wait_for_copy<<<1, 2 * kWarp, 0, stream>>>(p);
    JAXKV_RETURN_IF_CUDA_ERROR(cudaGetLastError());
  } while (i < places->size());
  return ffi::Error::Success();
}

// The wait for a copy that its start may not have enqueued entirely.
ffi::Error enqueue_and_wait(cudaStream_t stream, int32_t device, ffi::RunId run,
                            ffi::Buffer<ffi::S32> ticket, ffi::RemainingArgs args,
                            ffi::RemainingRets rets, ffi::Dictionary attributes) {
  // Negative if it is known on the device only.
  const auto segment = attributes.get<int64_t>("segment");
  if (!segment.has_value()) return segment.error();
  if (auto error = enqueue_through(stream, device, run.run_id, *segment); error.failure()) {
    return error;
  }
  return wait(stream, device, ticket, args, rets, attributes);
}

}  // namespace

ffi::Error prepare_wait_kernel() {
  cudaFuncAttributes attributes;
  JAXKV_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&attributes, wait_for_copy));
  return ffi::Error::Success();
}

using Int32s = ffi::Buffer<ffi::S32>;

XLA_FFI_DEFINE_HANDLER_SYMBOL(WaitCopyKernel, wait,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<Int32s>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

// No command-buffer trait: a replay would enqueue nothing.
XLA_FFI_DEFINE_HANDLER_SYMBOL(WaitCopyDma, enqueue_and_wait,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::RunId>()
                                  .Arg<Int32s>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs());

}  // namespace jaxkv::transfer
