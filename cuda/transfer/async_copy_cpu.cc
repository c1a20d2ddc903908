// The CPU backend's start and wait: the copy is complete when its start returns. A wait rejects the
// arrays that a GPU's wait rejects, so that a program that runs here runs there.
#include <algorithm>
#include <cstring>
#include <string>

#include "common/alias_check.h"
#include "common/error_ring.h"
#include "common/error_scope.h"
#include "transfer/block_copy.h"
#include "transfer/ticket.h"

namespace jaxkv::transfer {
namespace {

ffi::Error start_copy(ffi::Buffer<ffi::S32> planned, ffi::RemainingArgs args,
                      ffi::ResultBuffer<ffi::S32> ticket, ffi::RemainingRets rets,
                      CopyAttribute attribute, int64_t /*segment_buffers*/, bool joined) {
  std::memset(ticket->untyped_data(), 0, ticket->size_bytes());
  if (arrays_of_ticket(ticket->size_bytes()) != rets.size()) {
    return ffi::Error::InvalidArgument("jaxkv start_copy: ticket for " +
                                       std::to_string(arrays_of_ticket(ticket->size_bytes())) +
                                       " arrays, expected " + std::to_string(rets.size()));
  }
  auto* values = static_cast<Ticket*>(ticket->untyped_data());
  values->operation = static_cast<uint16_t>(operation_of(attribute));
  auto* written = values->written;
  for (size_t i = 0; i < rets.size() && !joined; ++i) {
    auto array = rets.get<ffi::AnyBuffer>(i);
    if (!array.has_value()) return array.error();
    written[i] = (*array)->untyped_data();
  }
  return copy_pairs_cpu(planned, args, rets, attribute);
}

// Records an error for each array that is not the one that the copy wrote.
ffi::Error check_written(ffi::Buffer<ffi::S32> ticket, ffi::RemainingRets rets, size_t first_array,
                         ffi::Span<const int64_t> places, int64_t segment, Scope scope) {
  const auto* values = static_cast<const Ticket*>(ticket.untyped_data());
  const auto* written = values->written;
  const auto num_written = static_cast<int64_t>(arrays_of_ticket(ticket.size_bytes()));
  for (size_t i = 0; i < places.size(); ++i) {
    auto array = rets.get<ffi::AnyBuffer>(first_array + i);
    if (!array.has_value()) return array.error();
    const int64_t place = places.begin()[i];
    if (place < 0 || place >= num_written) {
      return ffi::Error::InvalidArgument("jaxkv wait_copy: array index " + std::to_string(place) +
                                         " is outside [0, " + std::to_string(num_written) +
                                         ") of the ticket");
    }
    if (written[place] && written[place] != (*array)->untyped_data()) {
      const Fault fault{ErrorCode::kCopiedBeforeWait, static_cast<Operation>(values->operation)};
      record_host_error(scope, fault, static_cast<int32_t>(segment), static_cast<int32_t>(place),
                        0);
    }
  }
  return ffi::Error::Success();
}

ffi::Error wait_for_copy(ffi::Buffer<ffi::S32> ticket, ffi::RemainingArgs args,
                         ffi::RemainingRets rets, ffi::Dictionary attributes) {
  const auto first_array = attributes.get<int64_t>("first_array");
  const auto places = attributes.get<ffi::Span<const int64_t>>("places");
  const auto segment = attributes.get<int64_t>("segment");
  if (!first_array.has_value() || !places.has_value() || !segment.has_value()) {
    return ffi::Error::InvalidArgument("jaxkv wait_copy: missing or invalid attribute");
  }
  const size_t first_operand = args.size() + *first_array - rets.size();
  if (auto error = check_aliases(args, first_operand, rets, *first_array); error.failure()) {
    return error;
  }
  if (auto error =
          check_written(ticket, rets, *first_array, *places, *segment, scope_of_call(attributes));
      error.failure()) {
    return error;
  }
  if (*first_array == 0) return ffi::Error::Success();
  auto next = rets.get<ffi::Buffer<ffi::S32>>(0);
  if (!next.has_value()) return next.error();
  std::memcpy((*next)->untyped_data(), ticket.untyped_data(),
              std::min(ticket.size_bytes(), (*next)->size_bytes()));
  return ffi::Error::Success();
}

ffi::Error move_ticket(ffi::Buffer<ffi::S32> from, ffi::ResultBuffer<ffi::S32> to) {
  std::copy_n(from.typed_data(), std::min(from.element_count(), to->element_count()),
              to->typed_data());
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    MoveTicketCpu, move_ticket,
    ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::S32>>().Ret<ffi::Buffer<ffi::S32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(StartCopyCpu, start_copy,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .RemainingRets()
                                  .Attr<CopyAttribute>("copy")
                                  .Attr<int64_t>("segment_buffers")
                                  .Attr<bool>("joined"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    WaitCopyCpu, wait_for_copy,
    ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::S32>>().RemainingArgs().RemainingRets().Attrs());

}  // namespace jaxkv::transfer
