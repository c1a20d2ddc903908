// Decoding and checks of a call, shared by the CUDA and CPU handlers.
#include "recurrent/align_states.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "common/alias_check.h"
#include "common/error_scope.h"

namespace jaxkv::recurrent {

namespace {

ffi::Unexpected<ffi::Error> invalid(const std::string& message) {
  return ffi::Unexpected(ffi::Error::InvalidArgument("jaxkv recurrent states: " + message));
}

constexpr size_t kAlignOperands = 6;  // before the states

// The int32 operands and the result of accepted counts, each size checked against the block table.
ffi::ErrorOr<AlignBatch> decode_batch(ffi::RemainingArgs args, ffi::RemainingRets rets) {
  if (args.size() < kAlignOperands || rets.size() < 1) {
    return invalid(std::to_string(args.size()) + " operands and " + std::to_string(rets.size()) +
                   " results, expected at least " + std::to_string(kAlignOperands) + " and 1");
  }
  const auto table = args.get<ffi::Buffer<ffi::S32>>(3);
  if (!table.has_value() || table->dimensions().size() != 2 || table->element_count() > INT32_MAX) {
    return invalid("block_table is not int32[B, W]");
  }
  const auto rows = static_cast<size_t>(table->dimensions()[0]);
  const int32_t* operands[kAlignOperands];
  for (size_t i = 0; i < kAlignOperands; ++i) {
    const auto operand = args.get<ffi::Buffer<ffi::S32>>(i);
    const size_t expected[] = {rows + 1, rows, 1, table->element_count(), rows, rows};
    if (!operand.has_value() || operand->element_count() != expected[i]) {
      return invalid("operand " + std::to_string(i) + " is not int32[" +
                     std::to_string(expected[i]) + "]");
    }
    operands[i] = operand->typed_data();
  }
  auto counts = rets.get<ffi::Buffer<ffi::S32>>(0);
  if (!counts.has_value() || (*counts)->element_count() != rows) {
    return invalid("result 0 is not int32[B]");
  }
  return AlignBatch{
      .num_rows = static_cast<int32_t>(rows),
      .num_columns = static_cast<int32_t>(table->dimensions()[1]),
      .query_start_loc = operands[0],
      .seq_lens = operands[1],
      .num_reqs = operands[2],
      .block_table = operands[3],
      .known = operands[4],
      .num_accepted = operands[5],
      .accepted_out = (*counts)->typed_data(),
  };
}

bool valid_geometry(const StateGeometry& g) {
  return g.outer > 0 && g.width > 0 && g.inner_bytes > 0;
}

}  // namespace

std::vector<StateGeometry> different_geometries(const std::vector<StateGeometry>& all) {
  std::vector<StateGeometry> different;
  for (const auto& g : all) {
    if (std::ranges::find(different, g) == different.end()) different.push_back(g);
  }
  return different;
}

ffi::ErrorOr<AlignCall> decode_align(ffi::RemainingArgs args, ffi::RemainingRets rets,
                                     ffi::Dictionary attributes) {
  const auto before = attributes.get<bool>("before");
  const auto block_size = attributes.get<int64_t>("block_size");
  const auto num_blocks = attributes.get<int64_t>("num_blocks");
  const auto geometry = attributes.get<ffi::Span<const int64_t>>("geometry");
  if (!before.has_value() || !block_size.has_value() || !num_blocks.has_value() ||
      !geometry.has_value()) {
    return invalid("missing or invalid attribute");
  }
  if (*block_size < 1 || *block_size > INT32_MAX || *num_blocks < 1 || *num_blocks > INT32_MAX) {
    return invalid("block_size = " + std::to_string(*block_size) + ", num_blocks = " +
                   std::to_string(*num_blocks) + ": must be from 1 to 2^31 - 1");
  }
  const auto batch = decode_batch(args, rets);
  if (!batch.has_value()) return ffi::Unexpected(batch.error());
  const size_t num_states = rets.size() - 1;
  if (num_states < 1 || num_states > kMaxStates || geometry->size() != 4 * num_states) {
    return invalid(std::to_string(num_states) + " state arrays, " +
                   std::to_string(geometry->size()) + " geometry values: must be 1 to " +
                   std::to_string(kMaxStates) + " arrays with 4 values each");
  }
  if (auto error = check_aliases(args, kAlignOperands, rets, 1); error.failure()) {
    return ffi::Unexpected(error);
  }
  AlignCall call{*batch, scope_of_call(attributes), {}, {}};
  call.batch.before = *before;
  call.batch.block_size = static_cast<int32_t>(*block_size);
  call.batch.num_blocks = static_cast<int32_t>(*num_blocks);
  for (size_t s = 0; s < num_states; ++s) {
    const int64_t* v = geometry->begin() + 4 * s;
    const StateGeometry g{v[0], v[1], v[2], v[3]};
    auto state = rets.get<ffi::AnyBuffer>(1 + s);
    if (!state.has_value()) return ffi::Unexpected(state.error());
    const auto bytes = static_cast<int64_t>((*state)->size_bytes());
    if (!valid_geometry(g) || g.block_bytes() > INT32_MAX ||
        *num_blocks * g.block_bytes() != bytes) {
      return invalid("array " + std::to_string(s) + " has " + std::to_string(bytes) +
                     " bytes, needs " + std::to_string(*num_blocks) + " blocks of " +
                     std::to_string(g.block_bytes()) + ", each below 2^31");
    }
    call.batch.has_temporal |= g.temporal != 0;
    call.geometry.push_back(g);
    call.states.push_back(static_cast<std::byte*>((*state)->untyped_data()));
  }
  if (const size_t n = different_geometries(call.geometry).size(); n > kMaxGeometries) {
    return invalid(std::to_string(n) + " different geometries, at most " +
                   std::to_string(kMaxGeometries));
  }
  return call;
}

}  // namespace jaxkv::recurrent
