#include "transfer/block_copy.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <sstream>
#include <unordered_map>
#include <utility>

#include "common/alias_check.h"
#include "transfer/host_ids.h"

namespace jaxkv::transfer {
namespace {

// Error construction is kept out of line: calls run with cold instruction caches, in which unused
// code between hot paths costs time.
template <class... Parts>
[[gnu::cold, gnu::noinline]] ffi::Error invalid_argument(const Parts&... parts) {
  std::ostringstream message;
  message << "jaxkv page copy: ";
  (message << ... << parts);
  return ffi::Error::InvalidArgument(message.str());
}
template <class... Parts>
[[gnu::cold, gnu::noinline]] ffi::Unexpected<ffi::Error> invalid(const Parts&... parts) {
  return ffi::Unexpected(invalid_argument(parts...));
}

[[gnu::cold, gnu::noinline]] ffi::Error unreadable(const char* name, const char* reason) {
  return ffi::Error::InvalidArgument(std::string("jaxkv page copy: HostIds of ") + name + ": " +
                                     reason);
}

// End of the byte range of the strided side that ids in range can address.
int64_t strided_extent(const CopyGeometry& g) {
  return (g.num_strided - 1) * g.page_stride + g.run_offset(g.count0 - 1, g.count1 - 1) +
         g.run_bytes;
}

int64_t dense_extent(const CopyGeometry& g) {
  return (g.num_dense - 1) * g.dense_stride + g.block_bytes;
}

IdList id_list(ffi::Buffer<ffi::S32> operand, int64_t header) {
  const size_t length = operand.element_count();
  return {{operand.typed_data(), length}, std::min(static_cast<size_t>(header), length)};
}

bool valid_geometry(const CopyGeometry& g) {
  return g.run_bytes > 0 && g.count0 > 0 && g.count1 > 0 && g.stride0 >= 0 && g.stride1 >= 0 &&
         g.page_stride >= 0 && g.dense_stride >= g.block_bytes && g.num_dense > 0 &&
         g.num_strided > 0 && g.num_dense <= INT32_MAX && g.num_strided <= INT32_MAX &&
         g.block_bytes == g.run_bytes * g.count0 * g.count1;
}

// The fixed part of the attribute; the byte offsets of the buffers follow, strided then dense.
struct CopyNumbers {
  int64_t caller;  // the operation; from bit 8 on, the scope
  int64_t to_dense, num_sms, source_header, destination_header, num_dense_arrays;
  CopyGeometry geometry;
};
constexpr size_t kNumbers = sizeof(CopyNumbers) / sizeof(int64_t);

std::optional<CopyNumbers> read_numbers(CopyAttribute attribute) {
  if (attribute.size() < kNumbers) return std::nullopt;
  CopyNumbers numbers;
  std::memcpy(&numbers, attribute.begin(), sizeof numbers);
  return valid_geometry(numbers.geometry) ? std::optional(numbers) : std::nullopt;
}
constexpr char kInvalidAttribute[] = "attribute 'copy' is invalid";

// The address of block 0 of each buffer of one side, whose arrays start at operand `first`.
ffi::Error locate_buffers(ffi::RemainingArgs args, size_t first, size_t num_arrays, int64_t extent,
                          std::span<const int64_t> offsets, std::vector<std::byte*>& buffers) {
  for (size_t b = 0; b < offsets.size(); ++b) {
    const auto array = args.get<ffi::AnyBuffer>(first + b % num_arrays);
    if (!array.has_value()) return array.error();
    const int64_t offset = offsets[b];
    if (offset < 0 || offset + extent > static_cast<int64_t>(array->size_bytes())) {
      return invalid_argument("buffer ", b, ": bytes [", offset, ", ", offset + extent,
                              ") exceed the array of ", array->size_bytes(), " bytes");
    }
    buffers[b] = static_cast<std::byte*>(array->untyped_data()) + offset;
  }
  return ffi::Error::Success();
}

bool usable(const IdLists& ids, int32_t source, int32_t destination) {
  return source >= 0 && destination >= 0 && source < ids.num_sources &&
         destination < ids.num_destinations;
}

// Per-thread scratch memory that is reused, so that most calls do not allocate.
struct Scratch {
  std::vector<std::byte*> dense, strided;
  std::vector<BlockPair> pairs;
  std::unique_ptr<bool[]> marks;
  int32_t num_marks = 0;
};

Scratch& scratch() {
  static thread_local Scratch kept;
  return kept;
}

// One mark for each destination block: a hash table of thousands of ids takes longer than the copy
// engine. The marks are kept between calls, all false, so that a call with few ids does not pay for
// all blocks. Not a bitmap, in which each update would depend on the previous one to the same word.
bool* destination_marks(Scratch& kept, int32_t num_destinations) {
  if (kept.num_marks < num_destinations) {
    kept.marks = std::make_unique<bool[]>(num_destinations);
    kept.num_marks = num_destinations;
  }
  return kept.marks.get();
}

[[gnu::cold, gnu::noinline]] void reject(std::vector<ErrorEntry>* rejected, Fault fault,
                                         size_t position, int32_t id, int32_t limit) {
  rejected->push_back({fault.word, static_cast<int32_t>(position), id, limit, 0});
}

// Removes all pairs that share a destination. Rare, so it may scan all ids again.
void drop_duplicates(const IdLists& ids, std::vector<BlockPair>* pairs,
                     std::vector<ErrorEntry>* rejected) {
  std::unordered_map<int32_t, int> counts;
  for (const BlockPair pair : *pairs) ++counts[pair.destination];
  std::erase_if(*pairs, [&](BlockPair pair) { return counts[pair.destination] > 1; });
  for (size_t i = 0; i < ids.sources.size(); ++i) {
    const int32_t d = ids.destinations.ids()[i];
    if (usable(ids, ids.sources.ids()[i], d) && counts[d] > 1) {
      reject(rejected, {ErrorCode::kDuplicate, ids.operation}, i, d, ids.num_destinations);
    }
  }
}

}  // namespace

Scope scope_of_copy(CopyAttribute attribute) {
  return attribute.size() ? static_cast<Scope>(attribute.begin()[0] >> 8) : Scope::kDefault;
}

ffi::ErrorOr<IdLists> decode_ids(ffi::Buffer<ffi::S32> sources, ffi::Buffer<ffi::S32> destinations,
                                 CopyAttribute attribute) {
  const auto n = read_numbers(attribute);
  if (!n) return invalid(kInvalidAttribute);
  const auto num_dense = static_cast<int32_t>(n->geometry.num_dense);
  const auto num_strided = static_cast<int32_t>(n->geometry.num_strided);
  const IdLists ids{
      id_list(sources, n->source_header),       id_list(destinations, n->destination_header),
      n->to_dense ? num_strided : num_dense,    n->to_dense ? num_dense : num_strided,
      static_cast<Operation>(n->caller & 0xff), scope_of_copy(attribute)};
  if (ids.sources.size() != ids.destinations.size() || ids.sources.size() > INT32_MAX / 2) {
    return invalid(ids.sources.size(), " source ids, ", ids.destinations.size(),
                   " destination ids: must be equal numbers up to ", INT32_MAX / 2);
  }
  return ids;
}

ffi::ErrorOr<PairList> decode_pairs(ffi::Buffer<ffi::S32> operand) {
  if (operand.element_count() < 2)
    return invalid("plan of ", operand.element_count(), " words, expected at least 2");
  int32_t* words = operand.typed_data();
  return PairList{words, reinterpret_cast<BlockPair*>(words + 2), operand.element_count() / 2 - 1};
}

ffi::ErrorOr<BlockCopy> decode_copy(ffi::RemainingArgs args, ffi::RemainingRets rets,
                                    CopyAttribute attribute) {
  const auto n = read_numbers(attribute);
  if (!n) return invalid(kInvalidAttribute);
  const bool to_dense = n->to_dense;
  const CopyGeometry& g = n->geometry;
  const std::span<const int64_t> offsets(attribute.begin() + kNumbers, attribute.end());
  const size_t num_buffers = offsets.size() / 2;
  const auto num_dense_arrays = static_cast<size_t>(n->num_dense_arrays);
  if (num_buffers == 0 || offsets.size() % 2) return invalid("no buffers to copy");
  if (n->num_dense_arrays < 1 || args.size() <= num_dense_arrays) return invalid("no arrays");
  const size_t num_strided_arrays = args.size() - num_dense_arrays;
  for (const size_t num_arrays : {num_strided_arrays, num_dense_arrays}) {
    if (num_buffers % num_arrays) {
      return invalid(num_arrays, " arrays, expected a divisor of the ", num_buffers, " buffers");
    }
  }
  const size_t num_written = to_dense ? num_dense_arrays : num_strided_arrays;
  if (rets.size() != num_written) return invalid(rets.size(), " results, expected ", num_written);
  if (n->num_sms < 1) return invalid("num_sms = ", n->num_sms, ", expected at least 1");

  Scratch& kept = scratch();
  kept.dense.resize(num_buffers);
  kept.strided.resize(num_buffers);
  const size_t first_written = to_dense ? num_strided_arrays : 0;
  if (auto error = check_aliases(args, first_written, rets, 0); error.failure()) {
    return ffi::Unexpected(error);
  }
  if (auto error = locate_buffers(args, 0, num_strided_arrays, strided_extent(g),
                                  offsets.first(num_buffers), kept.strided);
      error.failure()) {
    return ffi::Unexpected(error);
  }
  if (auto error = locate_buffers(args, num_strided_arrays, num_dense_arrays, dense_extent(g),
                                  offsets.last(num_buffers), kept.dense);
      error.failure()) {
    return ffi::Unexpected(error);
  }
  return BlockCopy{to_dense, static_cast<int>(n->num_sms), g, kept.dense, kept.strided};
}

std::span<const BlockPair> select_pairs(const IdLists& ids, std::vector<ErrorEntry>* rejected) {
  Scratch& kept = scratch();
  std::vector<BlockPair>& planned = kept.pairs;
  planned.resize(ids.sources.size());
  BlockPair* const pairs = planned.data();
  const int32_t *const sources = ids.sources.ids(), *const destinations = ids.destinations.ids();
  const int32_t num_sources = ids.num_sources, num_destinations = ids.num_destinations;
  bool* const marks = destination_marks(kept, num_destinations);
  bool duplicates = false;
  size_t num_pairs = 0;
  for (size_t i = 0, n = planned.size(); i < n; ++i) {
    const int32_t s = sources[i], d = destinations[i];
    if (s < 0 || d < 0) continue;
    if (s >= num_sources) {
      reject(rejected, {ErrorCode::kSourceOutOfRange, ids.operation}, i, s, num_sources);
    } else if (d >= num_destinations) {
      reject(rejected, {ErrorCode::kDestinationOutOfRange, ids.operation}, i, d, num_destinations);
    } else {
      duplicates |= std::exchange(marks[d], true);
      pairs[num_pairs++] = {s, d};
    }
  }
  planned.resize(num_pairs);
  for (const BlockPair pair : planned) marks[pair.destination] = false;
  if (duplicates) drop_duplicates(ids, &planned, rejected);
  return planned;
}

ffi::Error check_host_ids(const IdList& list, const char* name) {
  const char* reason = list.header
                           ? host_ids_error(list.words.data(), list.words.size())
                           : "expected HostIds: implementation 'dma' reads the ids on the host";
  return reason ? unreadable(name, reason) : ffi::Error::Success();
}

}  // namespace jaxkv::transfer
