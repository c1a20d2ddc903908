#include "transfer/block_copy.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <sstream>
#include <tuple>
#include <utility>

#include "common/alias_check.h"
#include "transfer/host_ids.h"

namespace jaxkv::transfer {
namespace {

constexpr int64_t kMaxIds = INT32_MAX / 2;  // a plan has two words for each

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

ffi::ErrorOr<IdList> id_list(ffi::Buffer<ffi::S32> operand, int64_t first, int64_t count) {
  const auto length = static_cast<int64_t>(operand.element_count());
  if (first < 0 || first > length || count < 0 || count > std::min(length - first, kMaxIds)) {
    return invalid(count, " ids from word ", first, " on, of an operand of ", length,
                   " words; expected at most ", kMaxIds);
  }
  return IdList{{operand.typed_data(), operand.element_count()},
                static_cast<size_t>(first),
                static_cast<size_t>(count)};
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
  int64_t to_dense, num_sms;
  int64_t first_source, first_destination, num_ids;  // in words of their operands
  int64_t num_dense_arrays;
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
                          std::span<const int64_t> offsets, std::span<std::byte*> buffers) {
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
  std::vector<GroupCopy> copies;
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

// Threads of XLA never end, so each keeps a bounded amount of memory: of calls with more blocks the
// destinations are sorted, and the pairs of larger calls are freed at their end.
constexpr int32_t kMaxMarks = 1 << 24;
constexpr size_t kMaxKeptPairs = 1 << 16;

[[gnu::cold, gnu::noinline]] void reject(RejectedIds* rejected, Fault fault, size_t position,
                                         int32_t id, int32_t limit) {
  ++rejected->count;
  if (rejected->first.size() == ErrorRing::kEntries) return;
  rejected->first.push_back({fault.word, static_cast<int32_t>(position), id, limit, 0});
}

// Destinations of several pairs, in ascending order.
std::vector<int32_t> repeated_destinations(const std::vector<BlockPair>& pairs) {
  std::vector<int32_t> sorted(pairs.size());
  std::ranges::transform(pairs, sorted.begin(), &BlockPair::destination);
  std::ranges::sort(sorted);
  size_t repeated = 0;
  for (size_t i = 1; i < sorted.size(); ++i) {
    if (sorted[i] == sorted[i - 1]) sorted[repeated++] = sorted[i];
  }
  sorted.resize(repeated);
  return sorted;
}

// Removes all pairs that share a destination. Rare, so it may scan all ids again.
void drop_duplicates(const IdLists& ids, std::vector<BlockPair>* pairs, RejectedIds* rejected) {
  const auto repeated = repeated_destinations(*pairs);
  if (repeated.empty()) return;
  const auto is_repeated = [&](int32_t id) { return std::ranges::binary_search(repeated, id); };
  std::erase_if(*pairs, [&](BlockPair pair) { return is_repeated(pair.destination); });
  for (size_t i = 0; i < ids.sources.size(); ++i) {
    const int32_t d = ids.destinations.ids()[i];
    if (usable(ids, ids.sources.ids()[i], d) && is_repeated(d)) {
      reject(rejected, {ErrorCode::kDuplicate, ids.operation}, i, d, ids.num_destinations);
    }
  }
}

// Precedes the attribute of each copy of a call of several, in the order of its encoding.
struct GroupNumbers {
  int64_t length;                 // of the attribute that follows
  int64_t sources, destinations;  // operands; no destinations: sources are checked pairs
  int64_t new_ids;
  int64_t first_strided, num_strided_arrays, first_dense;
};
constexpr size_t kGroupNumbers = sizeof(GroupNumbers) / sizeof(int64_t);

size_t num_buffers_of(CopyAttribute attribute) { return (attribute.size() - kNumbers) / 2; }

// Operands that are the arrays of one side.
struct Operands {
  size_t first, count;
};

// Decodes the arrays of a copy, and checks every size.
ffi::ErrorOr<BlockCopy> locate_copy(ffi::RemainingArgs args, const CopyNumbers& n,
                                    CopyAttribute attribute, Operands strided_arrays,
                                    Operands dense_arrays, std::span<std::byte*> strided,
                                    std::span<std::byte*> dense) {
  const std::span<const int64_t> offsets(attribute.begin() + kNumbers, attribute.end());
  const size_t num_buffers = offsets.size() / 2;
  if (num_buffers == 0 || offsets.size() % 2) return invalid("no buffers to copy");
  if (n.num_sms < 1) return invalid("num_sms = ", n.num_sms, ", expected at least 1");
  for (const auto& [arrays, side, extent, where] :
       {std::tuple(strided_arrays, strided, strided_extent(n.geometry), offsets.first(num_buffers)),
        std::tuple(dense_arrays, dense, dense_extent(n.geometry), offsets.last(num_buffers))}) {
    if (arrays.count == 0 || arrays.count > args.size() ||
        arrays.first > args.size() - arrays.count || num_buffers % arrays.count) {
      return invalid(arrays.count, " arrays, expected a divisor of the ", num_buffers, " buffers");
    }
    if (auto error = locate_buffers(args, arrays.first, arrays.count, extent, where, side);
        error.failure()) {
      return ffi::Unexpected(error);
    }
  }
  return BlockCopy{n.to_dense != 0, static_cast<int>(n.num_sms), n.geometry, dense, strided};
}

}  // namespace

Scope scope_of_copy(CopyAttribute attribute) {
  return attribute.size() ? static_cast<Scope>(attribute.begin()[0] >> 8) : Scope::kDefault;
}

Scope scope_of_copies(CopyAttribute attribute) {
  const size_t first = std::min(kGroupNumbers, attribute.size());
  return scope_of_copy({attribute.begin() + first, attribute.size() - first});
}

ffi::ErrorOr<IdLists> decode_ids(ffi::Buffer<ffi::S32> sources, ffi::Buffer<ffi::S32> destinations,
                                 CopyAttribute attribute) {
  const auto n = read_numbers(attribute);
  if (!n) return invalid(kInvalidAttribute);
  const auto num_dense = static_cast<int32_t>(n->geometry.num_dense);
  const auto num_strided = static_cast<int32_t>(n->geometry.num_strided);
  const auto source_list = id_list(sources, n->first_source, n->num_ids);
  if (!source_list.has_value()) return ffi::Unexpected(source_list.error());
  const auto destination_list = id_list(destinations, n->first_destination, n->num_ids);
  if (!destination_list.has_value()) return ffi::Unexpected(destination_list.error());
  return IdLists{*source_list,
                 *destination_list,
                 n->to_dense ? num_strided : num_dense,
                 n->to_dense ? num_dense : num_strided,
                 static_cast<Operation>(n->caller & 0xff),
                 scope_of_copy(attribute)};
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
  const auto num_dense = static_cast<size_t>(n->num_dense_arrays);
  if (n->num_dense_arrays < 1 || args.size() <= num_dense) return invalid("no arrays");
  const size_t num_strided = args.size() - num_dense;
  const size_t num_written = n->to_dense ? num_dense : num_strided;
  if (rets.size() != num_written) return invalid(rets.size(), " results, expected ", num_written);
  if (auto error = check_aliases(args, n->to_dense ? num_strided : 0, rets, 0); error.failure()) {
    return ffi::Unexpected(error);
  }
  Scratch& kept = scratch();
  const size_t num_buffers = num_buffers_of(attribute);
  kept.dense.resize(num_buffers);
  kept.strided.resize(num_buffers);
  return locate_copy(args, *n, attribute, {0, num_strided}, {num_strided, num_dense}, kept.strided,
                     kept.dense);
}

ffi::ErrorOr<std::span<const GroupCopy>> decode_copies(ffi::RemainingArgs args,
                                                       ffi::RemainingRets rets,
                                                       CopyAttribute attribute) {
  if (rets.size() > args.size()) return invalid("more results than operands");
  const size_t first_written = args.size() - rets.size();
  if (auto error = check_aliases(args, first_written, rets, 0); error.failure()) {
    return ffi::Unexpected(error);
  }
  Scratch& kept = scratch();
  // All entries of the attribute bound the number of buffers, so that no vector reallocates.
  kept.dense.resize(attribute.size());
  kept.strided.resize(attribute.size());
  kept.copies.clear();
  size_t first_buffer = 0;
  for (const int64_t* at = attribute.begin(); at != attribute.end();) {
    GroupNumbers group;
    if (static_cast<size_t>(attribute.end() - at) < kGroupNumbers)
      return invalid(kInvalidAttribute);
    std::memcpy(&group, at, sizeof group);
    at += kGroupNumbers;
    if (group.length < 0 || attribute.end() - at < group.length) return invalid(kInvalidAttribute);
    const CopyAttribute of_copy(at, group.length);
    at += group.length;
    const auto n = read_numbers(of_copy);
    if (!n) return invalid(kInvalidAttribute);
    const int64_t written = n->to_dense ? group.first_dense : group.first_strided;
    if (written < static_cast<int64_t>(first_written))
      return invalid("a written array is no result");
    const size_t num_buffers = num_buffers_of(of_copy);
    const auto copy = locate_copy(
        args, *n, of_copy,
        {static_cast<size_t>(group.first_strided), static_cast<size_t>(group.num_strided_arrays)},
        {static_cast<size_t>(group.first_dense), static_cast<size_t>(n->num_dense_arrays)},
        std::span(kept.strided).subspan(first_buffer, num_buffers),
        std::span(kept.dense).subspan(first_buffer, num_buffers));
    if (!copy.has_value()) return ffi::Unexpected(copy.error());
    first_buffer += num_buffers;
    GroupCopy entry{*copy, {}, {}, group.new_ids != 0};
    const auto first_ids = args.get<ffi::Buffer<ffi::S32>>(group.sources);
    if (!first_ids.has_value()) return ffi::Unexpected(first_ids.error());
    if (group.destinations < 0) {
      const auto pairs = decode_pairs(*first_ids);
      if (!pairs.has_value()) return ffi::Unexpected(pairs.error());
      entry.pairs = *pairs;
    } else {
      const auto destinations = args.get<ffi::Buffer<ffi::S32>>(group.destinations);
      if (!destinations.has_value()) return ffi::Unexpected(destinations.error());
      const auto ids = decode_ids(*first_ids, *destinations, of_copy);
      if (!ids.has_value()) return ffi::Unexpected(ids.error());
      entry.ids = *ids;
    }
    kept.copies.push_back(entry);
  }
  return std::span<const GroupCopy>(kept.copies);
}

SelectedPairs select_pairs(const IdLists& ids, RejectedIds* rejected) {
  Scratch& kept = scratch();
  SelectedPairs selected;
  const size_t num_ids = ids.sources.size();
  std::vector<BlockPair>& planned = num_ids > kMaxKeptPairs ? selected.large : kept.pairs;
  planned.resize(num_ids);
  BlockPair* const pairs = planned.data();
  const int32_t *const sources = ids.sources.ids(), *const destinations = ids.destinations.ids();
  const int32_t num_sources = ids.num_sources, num_destinations = ids.num_destinations;
  const bool marked = num_destinations <= kMaxMarks;
  bool* const marks = marked ? destination_marks(kept, num_destinations) : nullptr;
  bool duplicates = !marked;  // unknown
  size_t num_pairs = 0;
  for (size_t i = 0; i < num_ids; ++i) {
    const int32_t s = sources[i], d = destinations[i];
    if (s < 0 || d < 0) continue;
    if (s >= num_sources) {
      reject(rejected, {ErrorCode::kSourceOutOfRange, ids.operation}, i, s, num_sources);
    } else if (d >= num_destinations) {
      reject(rejected, {ErrorCode::kDestinationOutOfRange, ids.operation}, i, d, num_destinations);
    } else {
      if (marked) duplicates |= std::exchange(marks[d], true);
      pairs[num_pairs++] = {s, d};
    }
  }
  planned.resize(num_pairs);
  if (marked) {
    for (const BlockPair pair : planned) marks[pair.destination] = false;
  }
  if (duplicates) drop_duplicates(ids, &planned, rejected);
  selected.pairs = planned;
  return selected;
}

ffi::Error check_host_ids(const IdList& list, const char* name) {
  const char* reason = list.is_host_ids()
                           ? host_ids_error(list.words.data(), list.words.size())
                           : "expected HostIds: implementation 'dma' reads the ids on the host";
  return reason ? unreadable(name, reason) : ffi::Error::Success();
}

}  // namespace jaxkv::transfer
