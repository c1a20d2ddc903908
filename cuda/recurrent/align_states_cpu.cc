// The CPU backend of the recurrent state copies.
#include <algorithm>
#include <cstring>

#include "recurrent/align_states.h"

namespace jaxkv::recurrent {

namespace {

// For a sliding state, the valid rows move to the front; the last `bias` rows keep their contents.
void move_state(const StateGeometry& g, std::byte* state, const StateCopy& move) {
  const int32_t source = g.temporal ? move.temporal_source : move.source;
  const int64_t bias = g.temporal ? 0 : std::min<int64_t>(move.bias, g.width);
  const std::byte* from = state + source * g.block_bytes() + bias * g.inner_bytes;
  std::byte* to = state + move.destination * g.block_bytes();
  for (int64_t o = 0; o < g.outer; ++o) {
    const int64_t offset = o * g.width * g.inner_bytes;
    std::memmove(to + offset, from + offset, (g.width - bias) * g.inner_bytes);
  }
}

ffi::Error align_states_cpu(ffi::RemainingArgs args, ffi::RemainingRets rets,
                            ffi::Dictionary attributes) {
  const auto call = decode_align(args, rets, attributes);
  if (!call.has_value()) return call.error();
  const AlignBatch& b = call->batch;
  const auto record = [&](Fault fault, int32_t position, int32_t id, int32_t limit) {
    record_host_error(call->scope, fault, position, id, limit);
  };
  for (int32_t row = 0; row < b.num_rows; ++row) {
    const int32_t accepted = b.num_accepted[row];
    const auto plan = plan_row(b, row, *b.num_reqs, accepted);
    StateCopy move;
    const bool moves = plan.valid && find_blocks(b, row, plan, &move, record);
    b.accepted_out[row] = moves && plan.reset ? 1 : accepted;
    for (size_t s = 0; moves && plan.copies && s < call->states.size(); ++s) {
      move_state(call->geometry[s], call->states[s], move);
    }
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(AlignStatesCpu, align_states_cpu,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());

}  // namespace jaxkv::recurrent
