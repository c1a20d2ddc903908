#include "transfer.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>

#include "host_ids.h"

namespace jaxkv {
namespace {

ffi::Unexpected<ffi::Error> invalid(std::string message) {
  return ffi::Unexpected(ffi::Error::InvalidArgument("jaxkv page copy: " + std::move(message)));
}

// The attribute `copy`.
struct CopyNumbers {
  int64_t to_dense, num_sms;
  CopyGeometry geometry;
};

// The attribute `ids`.
struct IdNumbers {
  int64_t source_header, destination_header, num_sources, num_destinations;
};

// Numbers come together in an attribute, because each look-up of a name takes its time.
template <class Numbers>
std::optional<Numbers> read_numbers(ffi::Dictionary attributes, const char* name) {
  const auto words = attributes.get<ffi::Span<const int64_t>>(name);
  if (!words.has_value() || words->size() * sizeof(int64_t) != sizeof(Numbers)) return std::nullopt;
  Numbers numbers;
  std::memcpy(&numbers, words->begin(), sizeof numbers);
  return numbers;
}

// One past the last byte of the strided side that an id in range can reach.
int64_t strided_extent(const CopyGeometry& g) {
  return (g.num_strided - 1) * g.page_stride + g.run_offset(g.count0 - 1, g.count1 - 1) +
         g.run_bytes;
}

IdList id_list(ffi::Buffer<ffi::S32> operand, int64_t header) {
  const size_t length = operand.element_count();
  return {{operand.typed_data(), length}, std::min(static_cast<size_t>(header), length)};
}

bool sound(const CopyGeometry& g) {
  return g.run_bytes > 0 && g.count0 > 0 && g.count1 > 0 && g.stride0 >= 0 && g.stride1 >= 0 &&
         g.page_stride >= 0 && g.num_dense > 0 && g.num_strided > 0 && g.num_dense <= INT32_MAX &&
         g.num_strided <= INT32_MAX && g.block_bytes == g.run_bytes * g.count0 * g.count1;
}

bool usable(const IdLists& ids, int32_t source, int32_t destination) {
  return source >= 0 && destination >= 0 && source < ids.num_sources &&
         destination < ids.num_destinations;
}

// A mark for each block of the destination: a hash table of thousands of ids costs more time than
// the copy engine takes. They are kept, all false between calls, as a call of few ids should not
// pay for every block there is. No bits, as each would have to wait for that before it in its word.
bool* destination_marks(int32_t num_destinations) {
  static thread_local std::unique_ptr<bool[]> marks;
  static thread_local int32_t size = 0;
  if (size < num_destinations) {
    marks = std::make_unique<bool[]>(num_destinations);
    size = num_destinations;
  }
  return marks.get();
}

// Takes out the pairs that share a destination. Rare, so it may look at everything again.
void refuse_twins(const IdLists& ids, std::vector<BlockPair>* pairs,
                  std::vector<PageErrorEntry>* refused) {
  std::unordered_map<int32_t, int> times;
  for (const BlockPair pair : *pairs) ++times[pair.destination];
  std::erase_if(*pairs, [&](BlockPair pair) { return times[pair.destination] > 1; });
  for (size_t i = 0; i < ids.sources.size(); ++i) {
    const int32_t d = ids.destinations.ids()[i];
    if (usable(ids, ids.sources.ids()[i], d) && times[d] > 1) {
      refused->push_back(
          {0, PageFault::kDuplicate, static_cast<int32_t>(i), d, ids.num_destinations});
    }
  }
}

}  // namespace

ffi::ErrorOr<IdLists> decode_ids(ffi::Buffer<ffi::S32> sources, ffi::Buffer<ffi::S32> destinations,
                                 ffi::Dictionary attributes) {
  const auto n = read_numbers<IdNumbers>(attributes, "ids");
  if (!n) return invalid("no attribute ids, or it is of another type or size");
  if (n->num_sources < 0 || n->num_sources > INT32_MAX || n->num_destinations < 0 ||
      n->num_destinations > INT32_MAX) {
    return invalid("more than 2^31 - 1 blocks");
  }
  const IdLists ids{
      id_list(sources, n->source_header), id_list(destinations, n->destination_header),
      static_cast<int32_t>(n->num_sources), static_cast<int32_t>(n->num_destinations)};
  if (ids.sources.size() != ids.destinations.size() || ids.sources.size() > INT32_MAX / 2) {
    return invalid("id lists of unequal length, or too long");
  }
  return ids;
}

ffi::ErrorOr<PairList> decode_pairs(ffi::Buffer<ffi::S32> operand) {
  if (operand.element_count() < 2) return invalid("no pairs");
  int32_t* words = operand.typed_data();
  return PairList{words, reinterpret_cast<BlockPair*>(words + 2), operand.element_count() / 2 - 1};
}

ffi::ErrorOr<BlockCopy> decode_copy(ffi::RemainingArgs args, ffi::RemainingRets rets,
                                    ffi::Dictionary attributes) {
  const auto n = read_numbers<CopyNumbers>(attributes, "copy");
  const auto offsets = attributes.get<ffi::Span<const int64_t>>("strided_offsets");
  if (!n || !offsets.has_value()) {
    return invalid("an attribute is missing, or it is of another type or size");
  }
  const bool to_dense = n->to_dense;
  const auto& strided_offsets = *offsets;
  const CopyGeometry& g = n->geometry;
  if (!sound(g)) return invalid("geometry is not sound");
  const size_t num_buffers = strided_offsets.size();
  if (num_buffers == 0 || args.size() <= num_buffers) return invalid("no buffers to copy");
  const size_t num_strided_arrays = args.size() - num_buffers;
  if (num_strided_arrays != 1 && num_strided_arrays != num_buffers) {
    return invalid(std::to_string(num_strided_arrays) + " strided arrays for " +
                   std::to_string(num_buffers) + " buffers");
  }
  const size_t num_written = to_dense ? num_buffers : num_strided_arrays;
  if (rets.size() != num_written) return invalid("wrong number of results");
  if (n->num_sms < 1) return invalid("num_sms is below 1");

  static thread_local std::vector<std::byte*> dense_firsts, strided_firsts;
  dense_firsts.resize(num_buffers);
  strided_firsts.resize(num_buffers);
  // Results alias the written operands, so the written side is read off the results.
  auto array = [&](size_t index, bool written) -> ffi::ErrorOr<ffi::AnyBuffer> {
    if (!written) return args.get<ffi::AnyBuffer>(index);
    auto result = rets.get<ffi::AnyBuffer>(index - (to_dense ? num_strided_arrays : 0));
    if (!result.has_value()) return ffi::Unexpected(result.error());
    return **result;
  };
  for (size_t b = 0; b < num_buffers; ++b) {
    auto strided = array(num_strided_arrays == 1 ? 0 : b, !to_dense);
    auto dense = array(num_strided_arrays + b, to_dense);
    if (!strided.has_value()) return ffi::Unexpected(strided.error());
    if (!dense.has_value()) return ffi::Unexpected(dense.error());
    const int64_t offset = strided_offsets.begin()[b];
    if (offset < 0 || offset + strided_extent(g) > static_cast<int64_t>(strided->size_bytes())) {
      return invalid("buffer " + std::to_string(b) + " ends past its strided array of " +
                     std::to_string(strided->size_bytes()) + " bytes");
    }
    if (g.num_dense * g.block_bytes > static_cast<int64_t>(dense->size_bytes())) {
      return invalid("dense array " + std::to_string(b) + " has " +
                     std::to_string(dense->size_bytes()) + " bytes, needs " +
                     std::to_string(g.num_dense * g.block_bytes));
    }
    strided_firsts[b] = static_cast<std::byte*>(strided->untyped_data()) + offset;
    dense_firsts[b] = static_cast<std::byte*>(dense->untyped_data());
  }
  return BlockCopy{to_dense, static_cast<int>(n->num_sms), g, dense_firsts, strided_firsts};
}

std::span<const BlockPair> plan_on_host(const IdLists& ids, std::vector<PageErrorEntry>* refused) {
  static thread_local std::vector<BlockPair> planned;
  planned.resize(ids.sources.size());
  BlockPair* const pairs = planned.data();
  const int32_t *const sources = ids.sources.ids(), *const destinations = ids.destinations.ids();
  const int32_t num_sources = ids.num_sources, num_destinations = ids.num_destinations;
  bool* const marks = destination_marks(num_destinations);
  auto refuse = [refused](PageFault fault, size_t i, int32_t id, int32_t limit) {
    refused->push_back({0, fault, static_cast<int32_t>(i), id, limit});
  };
  bool twins = false;
  size_t num_pairs = 0;
  for (size_t i = 0, n = planned.size(); i < n; ++i) {
    const int32_t s = sources[i], d = destinations[i];
    if (s < 0 || d < 0) continue;
    if (s >= num_sources) {
      refuse(PageFault::kSourceOutOfRange, i, s, num_sources);
    } else if (d >= num_destinations) {
      refuse(PageFault::kDestinationOutOfRange, i, d, num_destinations);
    } else {
      twins |= std::exchange(marks[d], true);
      pairs[num_pairs++] = {s, d};
    }
  }
  planned.resize(num_pairs);
  for (const BlockPair pair : planned) marks[pair.destination] = false;
  if (twins) refuse_twins(ids, &planned, refused);
  return planned;
}

ffi::Error open_ids(const IdList& list, const char* name) {
  std::string why_not;
  if (list.header == 0 || open_host_ids(list.words.data(), list.words.size(), &why_not)) {
    return ffi::Error::Success();
  }
  return ffi::Error::InvalidArgument(std::string("jaxkv HostIds of ") + name + ": " + why_not);
}

}  // namespace jaxkv
