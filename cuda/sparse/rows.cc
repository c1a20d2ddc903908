// Decoding and checks of a call, shared by the CUDA and CPU handlers.
#include "sparse/rows.h"

#include <string>

#include "common/alias_check.h"
#include "common/error_scope.h"

namespace jaxkv::sparse {

namespace {

using Int64s = ffi::Span<const int64_t>;

ffi::Unexpected<ffi::Error> invalid(const std::string& message) {
  return ffi::Unexpected(ffi::Error::InvalidArgument("jaxkv sparse rows: " + message));
}

// The attribute `geometry`, in the order of fetch.py.
struct Geometry {
  int64_t num_sms, layer, num_layers, num_requests, num_ids, slots, max_length, num_columns,
      num_pages, page_size, row_bytes, layer_offset, page_stride, token_stride;
  static constexpr size_t kNumbers = 14;
};

bool is_size(int64_t value, int64_t most) { return value >= 1 && value <= most; }

ffi::ErrorOr<Geometry> decode_geometry(ffi::Dictionary attributes) {
  const auto numbers = attributes.get<Int64s>("geometry");
  if (!numbers.has_value() || numbers->size() != Geometry::kNumbers) {
    return invalid("geometry must have " + std::to_string(Geometry::kNumbers) + " numbers");
  }
  const int64_t* n = numbers->begin();
  const Geometry g{n[0], n[1], n[2], n[3],  n[4],  n[5],  n[6],
                   n[7], n[8], n[9], n[10], n[11], n[12], n[13]};
  const bool valid =
      is_size(g.num_sms, INT32_MAX) && g.layer >= 0 && g.layer < g.num_layers &&
      is_size(g.num_requests, kMaxBatch) && is_size(g.num_ids, kMaxIds) &&
      is_size(g.slots, kMaxSlots) && g.num_ids <= g.slots &&
      is_size(g.num_layers, INT32_MAX / (g.num_requests * g.slots)) &&
      is_size(g.max_length, INT32_MAX) && is_size(g.num_columns, INT32_MAX / kMaxBatch) &&
      is_size(g.num_pages, INT32_MAX) && is_size(g.page_size, INT32_MAX / g.num_pages) &&
      is_size(g.row_bytes, INT32_MAX) && g.row_bytes % kWordBytes == 0 &&
      g.num_requests * g.num_ids * (g.row_bytes / kWordBytes) <= INT32_MAX && g.layer_offset >= 0 &&
      g.layer_offset % kWordBytes == 0 && g.page_stride >= 0 && g.page_stride % kWordBytes == 0 &&
      g.token_stride >= 0 && g.token_stride % kWordBytes == 0;
  if (!valid) return invalid("a size is outside of its range");
  return g;
}

// The operands and results of a call by position, with the first error of any of them.
class Operands {
 public:
  Operands(ffi::RemainingArgs args, ffi::RemainingRets rets) : args_(args), rets_(rets) {}

  template <typename T>
  T* arg(size_t index, int64_t bytes) {
    const auto buffer = args_.get<ffi::AnyBuffer>(index);
    if (!buffer.has_value()) return fail<T>("operand", index, bytes, -1);
    const auto size = static_cast<int64_t>(buffer->size_bytes());
    if (size != bytes) return fail<T>("operand", index, bytes, size);
    return static_cast<T*>(buffer->untyped_data());
  }
  template <typename T>
  T* ret(size_t index, int64_t bytes) {
    auto buffer = rets_.get<ffi::AnyBuffer>(index);
    if (!buffer.has_value()) return fail<T>("result", index, bytes, -1);
    const auto size = static_cast<int64_t>((*buffer)->size_bytes());
    if (size != bytes) return fail<T>("result", index, bytes, size);
    return static_cast<T*>((*buffer)->untyped_data());
  }
  const std::string& error() const { return error_; }

 private:
  template <typename T>
  T* fail(const char* side, size_t index, int64_t bytes, int64_t size) {
    if (error_.empty()) {
      error_ = std::string(side) + " " + std::to_string(index) + " has " + std::to_string(size) +
               " bytes, needs " + std::to_string(bytes);
    }
    return nullptr;
  }

  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  std::string error_;
};

// The state of layer `layer`, from result `first` on.
void decode_state(const Geometry& g, Operands& operands, size_t first, RowCall* call) {
  const int64_t requests = g.num_layers * g.num_requests, layer = g.layer * g.num_requests;
  RowBatch& b = call->batch;
  call->addresses.hot = operands.ret<std::byte>(first, requests * g.slots * g.row_bytes) +
                        layer * g.slots * g.row_bytes;
  b.positions = operands.ret<int32_t>(first + 1, requests * g.slots * 4) + layer * g.slots;
  b.used = operands.ret<int32_t>(first + 2, requests * g.slots * 4) + layer * g.slots;
  b.slot_of = operands.ret<int16_t>(first + 3, requests * g.max_length * 2) + layer * g.max_length;
  b.clock = operands.ret<int32_t>(first + 4, requests * 4) + layer;
}

RowCall start_call(bool append, const Geometry& g, Scope scope) {
  RowCall call{{}, {}, scope, static_cast<int32_t>(g.num_sms)};
  RowBatch& b = call.batch;
  b.append = append;
  b.operation = append ? Operation::kSparseAppend : Operation::kSparseFetch;
  b.num_requests = static_cast<int32_t>(g.num_requests);
  b.num_ids = static_cast<int32_t>(g.num_ids);
  b.slots = static_cast<int32_t>(g.slots);
  b.max_length = static_cast<int32_t>(g.max_length);
  b.num_columns = static_cast<int32_t>(g.num_columns);
  b.num_pages = static_cast<int32_t>(g.num_pages);
  b.page_size = Divisor(static_cast<int32_t>(g.page_size));
  b.first_row = static_cast<int32_t>(g.layer * g.num_requests * g.slots);
  RowAddresses& a = call.addresses;
  a.page_stride = g.page_stride;
  a.token_stride = g.token_stride;
  a.page_size = b.page_size;
  a.row_bytes = static_cast<int32_t>(g.row_bytes);
  return call;
}

ffi::Error check_numbers(ffi::RemainingArgs args, size_t num_args, ffi::RemainingRets rets,
                         size_t num_rets) {
  if (args.size() == num_args && rets.size() == num_rets) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("jaxkv sparse rows: " + std::to_string(args.size()) +
                                     " operands and " + std::to_string(rets.size()) +
                                     " results, expected " + std::to_string(num_args) + " and " +
                                     std::to_string(num_rets));
}

ffi::Error decode_pool(const Geometry& g, ffi::RemainingArgs args, size_t index, RowCall* call) {
  const auto pool = args.get<ffi::AnyBuffer>(index);
  if (!pool.has_value()) return pool.error();
  const int64_t needed = g.layer_offset + (g.num_pages - 1) * g.page_stride +
                         (g.page_size - 1) * g.token_stride + g.row_bytes;
  if (needed > static_cast<int64_t>(pool->size_bytes())) {
    return ffi::Error::InvalidArgument("jaxkv sparse rows: the pool has " +
                                       std::to_string(pool->size_bytes()) + " bytes, needs " +
                                       std::to_string(needed));
  }
  call->addresses.pool = static_cast<std::byte*>(pool->untyped_data()) + g.layer_offset;
  return ffi::Error::Success();
}

}  // namespace

ffi::ErrorOr<RowCall> decode_rows(bool append, ffi::RemainingArgs args, ffi::RemainingRets rets,
                                  ffi::Dictionary attributes) {
  const auto decoded = decode_geometry(attributes);
  if (!decoded.has_value()) return ffi::Unexpected(decoded.error());
  const Geometry& g = *decoded;
  const size_t state_arg = append ? 3 : 4, state_ret = append ? 1 : 3;
  if (auto error = check_numbers(args, state_arg + 5, rets, state_ret + 5); error.failure()) {
    return ffi::Unexpected(error);
  }
  if (auto error = check_aliases(args, state_arg, rets, state_ret); error.failure()) {
    return ffi::Unexpected(error);
  }
  RowCall call = start_call(append, g, scope_of_call(attributes));
  RowBatch& b = call.batch;
  Operands operands(args, rets);
  const int64_t ids = g.num_requests * g.num_ids, table = g.num_requests * g.num_columns;
  b.ids = operands.arg<int32_t>(0, ids * 4);
  b.block_table = operands.arg<int32_t>(append ? 1 : 2, table * 4);
  b.moves = operands.ret<RowMove>(append ? 0 : 1, ids * static_cast<int64_t>(sizeof(RowMove)));
  if (append) {
    call.addresses.added = operands.arg<std::byte>(2, ids * g.row_bytes);
  } else {
    if (auto error = decode_pool(g, args, 3, &call); error.failure()) return ffi::Unexpected(error);
    b.lengths = operands.arg<int32_t>(1, g.num_requests * 4);
    b.rows = operands.ret<int32_t>(0, ids * 4);
    b.counts = operands.ret<int32_t>(2, g.num_requests * 4);
  }
  decode_state(g, operands, state_ret, &call);
  if (!operands.error().empty()) return invalid(operands.error());
  return call;
}

ffi::ErrorOr<RowCall> decode_added_rows(ffi::RemainingArgs args, ffi::RemainingRets rets,
                                        ffi::Dictionary attributes) {
  const auto decoded = decode_geometry(attributes);
  if (!decoded.has_value()) return ffi::Unexpected(decoded.error());
  const Geometry& g = *decoded;
  if (auto error = check_numbers(args, 3, rets, 1); error.failure()) return ffi::Unexpected(error);
  if (auto error = check_aliases(args, 2, rets, 0); error.failure()) return ffi::Unexpected(error);
  RowCall call = start_call(/*append=*/true, g, scope_of_call(attributes));
  if (auto error = decode_pool(g, args, 2, &call); error.failure()) return ffi::Unexpected(error);
  Operands operands(args, rets);
  const int64_t ids = g.num_requests * g.num_ids;
  call.batch.moves = operands.arg<RowMove>(0, ids * static_cast<int64_t>(sizeof(RowMove)));
  call.addresses.added = operands.arg<std::byte>(1, ids * g.row_bytes);
  if (!operands.error().empty()) return invalid(operands.error());
  return call;
}

}  // namespace jaxkv::sparse
