// Several copies in one launch: the groups of a call, and the block sizes of a layer.
//
// The index spaces of the copies follow each other, and each thread block copies one stretch of
// their concatenation, so that the work is divided evenly whatever the sizes of the copies. Most
// thread blocks copy words of one copy only; at a boundary, a thread block checks the ids of both.
#include <algorithm>

#include "common/cuda_check.h"
#include "transfer/copy_kernel.cuh"

namespace jaxkv::transfer {
namespace {

constexpr int kMaxCopies = 8;           // per launch
constexpr int kMaxGroupBuffers = 1024;  // of all copies: 16 KiB of kernel parameters
constexpr uint32_t kUnitsPerStep = kCopyThreads / kAlignedWords;
constexpr int kFewGroupBuffers = 64;  // 1 KiB, besides 2 KiB for the copies

struct CopyOfGroup : CopyParams {
  uint32_t first_unit;  // of kAlignedWords words, in the concatenated index spaces
  uint32_t first_buffer;

  __host__ __device__ uint32_t num_words() const { return last_pair * words_per_pair(); }
  __host__ __device__ uint32_t last_unit() const {
    return first_unit + (num_words() + kAlignedWords - 1) / kAlignedWords;
  }
};

template <int kBuffers>
struct GroupParams {
  uint32_t num_copies;
  uint32_t stretch;  // units per thread block
  CopyOfGroup copies[kMaxCopies];
  std::byte* dense[kBuffers];
  std::byte* strided[kBuffers];
};
static_assert(sizeof(GroupParams<kMaxGroupBuffers>) < 32764, "kernel parameters");

// The parameters and buffers of one copy.
template <int kBuffers>
struct ParamsOfCopy {
  // Fewer than for a single copy: its parameters are operands of instructions, those of a copy
  // known at run time take registers.
  static constexpr int kWordsInFlight = 3;
  static constexpr int kPlacesAtOnce = 1;

  const GroupParams<kBuffers>& group;
  uint32_t index;

  // Reads the parameters again: for the compiler the index may be another one.
  __device__ ParamsOfCopy reloaded() const {
    uint32_t opaque = index;
    asm volatile("" : "+r"(opaque));
    return {group, opaque};
  }
  __device__ const CopyOfGroup& params() const { return group.copies[index]; }
  __device__ std::byte* dense_buffer(uint32_t buffer) const {
    return group.dense[params().first_buffer + buffer];
  }
  __device__ std::byte* strided_buffer(uint32_t buffer) const {
    return group.strided[params().first_buffer + buffer];
  }
};

// The end of the first `word` of `most` words, if there are only `total`: the share of every thread
// block shrinks by the same factor, and never exceeds what it is of `most` words.
__device__ uint32_t scaled(uint32_t word, uint32_t total, uint32_t most) {
  if (total == most) return word;
  const uint64_t end = (uint64_t{word} * total + most - 1) / most;
  return static_cast<uint32_t>(
      min((end + kAlignedWords - 1) / kAlignedWords * kAlignedWords, uint64_t{total}));
}

// The words [first, last) of a copy of `p.last_pair` pairs, of which `num_pairs` are valid.
__device__ Work work_of_words(const CopyOfGroup& p, Span own, uint32_t num_pairs) {
  const uint32_t per_pair = p.words_per_pair();
  const uint32_t total = min(p.last_pair, num_pairs) * per_pair;
  const Span words{scaled(own.first, total, p.num_words()), scaled(own.last, total, p.num_words())};
  if (words.size() == 0) return {words, {}};
  return {words,
          {{words.first / per_pair, (words.last - 1) / per_pair + 1}, words.first % per_pair != 0}};
}

template <int kBuffers, typename Word, bool kToDense, bool kSingleRun>
__global__ void __launch_bounds__(kCopyThreads)
    copy_group(const __grid_constant__ GroupParams<kBuffers> group) {
  extern __shared__ __align__(16) std::byte shared[];
  for (uint32_t c = 0; c < group.num_copies; ++c) {
    const CopyOfGroup& p = group.copies[c];
    const uint32_t begin = max(blockIdx.x * group.stretch, p.first_unit);
    const uint32_t end = min((blockIdx.x + 1) * group.stretch, p.last_unit());
    if (begin >= end) continue;
    const Span own{(begin - p.first_unit) * kAlignedWords,
                   min((end - p.first_unit) * kAlignedWords, p.num_words())};
    __syncthreads();  // shared memory: the pairs of the preceding copy have been read
    const ParamsOfCopy<kBuffers> params{group, c};
    Window<ParamsOfCopy<kBuffers>, Word, kToDense, kSingleRun> window(params);
    Work work;
    auto work_of = [&](uint32_t num_pairs) { return work_of_words(p, own, num_pairs); };
    auto is_first = [&] { return own.first == 0; };
    const BlockPair* pairs = open(p, is_first, work_of, window, work, shared);
    window.run(work, pairs, 0);
  }
}

template <int kBuffers, typename Word>
void* group_kernel(bool to_dense, bool single_run) {
  if (to_dense) {
    return single_run ? reinterpret_cast<void*>(copy_group<kBuffers, Word, true, true>)
                      : reinterpret_cast<void*>(copy_group<kBuffers, Word, true, false>);
  }
  return single_run ? reinterpret_cast<void*>(copy_group<kBuffers, Word, false, true>)
                    : reinterpret_cast<void*>(copy_group<kBuffers, Word, false, false>);
}

void* group_kernel(int word_bytes, bool to_dense, bool single_run, bool few_buffers) {
  if (few_buffers) return group_kernel<kFewGroupBuffers, uint4>(to_dense, single_run);
  switch (word_bytes) {
    case 16:
      return group_kernel<kMaxGroupBuffers, uint4>(to_dense, single_run);
    case 8:
      return group_kernel<kMaxGroupBuffers, uint2>(to_dense, single_run);
    case 4:
      return group_kernel<kMaxGroupBuffers, uint32_t>(to_dense, single_run);
    case 2:
      return group_kernel<kMaxGroupBuffers, uint16_t>(to_dense, single_run);
    default:
      return group_kernel<kMaxGroupBuffers, uint8_t>(to_dense, single_run);
  }
}

// SMs with as many bytes in flight as `sms` of a single copy, which may just saturate the link.
uint32_t with_equal_words_in_flight(uint32_t sms) {
  constexpr int kOfGroup = ParamsOfCopy<kMaxGroupBuffers>::kWordsInFlight;
  constexpr int kOfCopy = CopyParamsOf<kMaxBuffers>::kWordsInFlight;
  const uint32_t equal = (sms * kOfCopy + kOfGroup - 1) / kOfGroup;
  return std::max(sms, std::min(equal, max_sms()));
}

ffi::Error launch_alone(cudaStream_t stream, const GroupCopy& entry, ErrorRings* errors) {
  if (entry.pairs.pairs) return launch_copy(stream, entry.copy, entry.pairs);
  return launch_copy(stream, entry.copy, entry.ids, entry.new_ids ? errors : nullptr);
}

// Copies of one launch, all with words of `width` bytes.
class GroupLaunch {
 public:
  GroupLaunch(cudaStream_t stream, ErrorRings* errors, int width)
      : stream_(stream), errors_(errors), width_(width) {}

  // Whether the copy can be part of any launch of several copies.
  bool can_share(const GroupCopy& entry) const {
    const size_t buffers = entry.copy.dense.size();
    const int64_t block_words = entry.copy.geometry.block_bytes / width_;
    if (buffers > kMaxBuffers || block_words >= kMaxWords) return false;
    const auto words_per_pair = static_cast<uint64_t>(block_words) * buffers;
    if (!entry.pairs.pairs && entry.ids.sources.size() > kInlineIds) return false;
    return words_per_pair < kMaxWords && num_pairs(entry) <= (kMaxWords - 1) / words_per_pair;
  }
  bool has_room(const GroupCopy& entry) const {
    return entries_.empty() ||
           (entries_.size() < kMaxCopies && entry.copy.to_dense == entries_[0]->copy.to_dense &&
            num_buffers_ + entry.copy.dense.size() <= kMaxGroupBuffers);
  }
  void add(const GroupCopy& entry) {
    entries_.push_back(&entry);
    num_buffers_ += entry.copy.dense.size();
  }

  // Enqueues the copies and leaves the launch empty.
  ffi::Error run() {
    auto error = ffi::Error::Success();
    if (entries_.size() == 1) {
      error = launch_alone(stream_, *entries_[0], errors_);
    } else if (!entries_.empty()) {
      const bool few = width_ == 16 && num_buffers_ <= kFewGroupBuffers;
      error = few ? run<kFewGroupBuffers>() : run<kMaxGroupBuffers>();
    }
    entries_.clear();
    num_buffers_ = 0;
    return error;
  }

 private:
  static size_t num_pairs(const GroupCopy& entry) {
    return entry.pairs.pairs ? entry.pairs.capacity : entry.ids.sources.size();
  }

  template <int kBuffers>
  ffi::Error run() {
    GroupParams<kBuffers> p;
    bool single_run = true;
    int num_sms = 1;
    uint32_t units = 0, buffers = 0;
    p.num_copies = static_cast<uint32_t>(entries_.size());
    for (size_t c = 0; c < entries_.size(); ++c) {
      const GroupCopy& entry = *entries_[c];
      const BlockCopy& copy = entry.copy;
      ErrorRings* errors = entry.new_ids ? errors_ : nullptr;
      const Pairs pairs = entry.pairs.pairs
                              ? checked_pairs(copy, entry.pairs)
                              : Pairs{id_params(entry.ids, errors), {}, num_pairs(entry)};
      p.copies[c] = {copy_params(copy.geometry, pairs, width_, copy.dense.size()), units, buffers};
      std::ranges::copy(copy.dense, p.dense + buffers);
      std::ranges::copy(copy.strided, p.strided + buffers);
      buffers += static_cast<uint32_t>(copy.dense.size());
      units = p.copies[c].last_unit();
      single_run &= copy.geometry.single_run();
      num_sms = std::max(num_sms, copy.num_sms);
    }
    const uint32_t wanted = std::max(1u, (units + kUnitsPerStep - 1) / kUnitsPerStep);
    const auto blocks =
        std::min(wanted, with_equal_words_in_flight(static_cast<uint32_t>(num_sms)));
    p.stretch = (units + blocks - 1) / blocks;
    const uint32_t shared_bytes = divide_shared_memory(p);
    if (shared_bytes > max_shared_bytes()) return run_one_by_one();
    void* kernel =
        group_kernel(width_, entries_[0]->copy.to_dense, single_run, kBuffers == kFewGroupBuffers);
    void* arguments[] = {&p};
    JAXKV_RETURN_IF_CUDA_ERROR(cudaLaunchKernel(kernel, dim3(blocks), dim3(kCopyThreads), arguments,
                                                shared_bytes, stream_));
    return ffi::Error::Success();
  }

  // Sets the size of each share; returns the shared memory of the largest.
  template <int kBuffers>
  static uint32_t divide_shared_memory(GroupParams<kBuffers>& p) {
    const uint32_t limit = std::min(kMaxSharedForIds, max_shared_bytes());
    const uint64_t stretch = uint64_t{p.stretch} * kAlignedWords;
    uint64_t bytes = 0;
    for (CopyOfGroup& copy : std::span(p.copies, p.num_copies)) {
      // A stretch may begin and end within a pair.
      const auto pairs = static_cast<uint32_t>(
          std::min<uint64_t>(copy.last_pair, stretch / copy.words_per_pair() + 2));
      if (!copy.pairs) copy.share = ShareSize(pairs).with_copy(copy.ids.num_ids, limit);
      bytes = std::max(
          bytes, copy.pairs ? pairs * uint64_t{sizeof(BlockPair)} : uint64_t{copy.share.bytes()});
    }
    return static_cast<uint32_t>(std::min<uint64_t>(bytes, UINT32_MAX));
  }

  ffi::Error run_one_by_one() const {
    for (const GroupCopy* entry : entries_) {
      if (auto error = launch_alone(stream_, *entry, errors_); error.failure()) return error;
    }
    return ffi::Error::Success();
  }

  cudaStream_t stream_;
  ErrorRings* errors_;
  int width_;
  std::vector<const GroupCopy*> entries_;
  size_t num_buffers_ = 0;
};

}  // namespace

ffi::Error launch_copies(cudaStream_t stream, std::span<const GroupCopy> copies,
                         ErrorRings* errors) {
  for (const int width : {16, 8, 4, 2, 1}) {
    GroupLaunch launch(stream, errors, width);
    for (const GroupCopy& entry : copies) {
      if (word_bytes(entry.copy) != width) continue;
      const bool alone = !launch.can_share(entry);
      if (alone || !launch.has_room(entry)) {
        if (auto error = launch.run(); error.failure()) return error;
      }
      launch.add(entry);
      if (alone) {
        if (auto error = launch.run(); error.failure()) return error;
      }
    }
    if (auto error = launch.run(); error.failure()) return error;
  }
  return ffi::Error::Success();
}

std::vector<void*> group_kernels() {
  std::vector<void*> kernels;
  for (const bool to_dense : {false, true}) {
    for (const bool single_run : {false, true}) {
      for (const int width : {1, 2, 4, 8, 16}) {
        kernels.push_back(group_kernel(width, to_dense, single_run, false));
      }
      kernels.push_back(group_kernel(16, to_dense, single_run, true));
    }
  }
  return kernels;
}

}  // namespace jaxkv::transfer
