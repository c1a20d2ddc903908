// The CPU backend's start and wait: the copy is complete when its start returns.
#include <algorithm>

#include "common/alias_check.h"
#include "transfer/block_copy.h"

namespace jaxkv::transfer {
namespace {

ffi::Error start_copy(ffi::Buffer<ffi::S32> planned, ffi::RemainingArgs args,
                      ffi::ResultBuffer<ffi::S32> ticket, ffi::RemainingRets rets,
                      CopyAttribute attribute, int64_t /*segment_buffers*/, bool /*joined*/) {
  std::fill_n(ticket->typed_data(), ticket->element_count(), 0);
  return copy_pairs_cpu(planned, args, rets, attribute);
}

ffi::Error wait_for_copy(ffi::Buffer<ffi::S32> ticket, ffi::RemainingArgs args,
                         ffi::RemainingRets rets, ffi::Dictionary attributes) {
  const auto first_array = attributes.get<int64_t>("first_array");
  if (!first_array.has_value()) return first_array.error();
  const size_t first_operand = args.size() + *first_array - rets.size();
  if (auto error = check_aliases(args, first_operand, rets, *first_array); error.failure()) {
    return error;
  }
  if (*first_array == 0) return ffi::Error::Success();
  auto next = rets.get<ffi::Buffer<ffi::S32>>(0);
  if (!next.has_value()) return next.error();
  std::copy_n(ticket.typed_data(), std::min(ticket.element_count(), (*next)->element_count()),
              (*next)->typed_data());
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
