// The kernel that copies recurrent states: one launch for all rows and arrays.
//
// Every thread block evaluates all rows from the same snapshot and exits if none copies. Otherwise
// the thread blocks partition the list of copies, which is identical in all of them.
//
// A block of a state is divided into columns of words along the axis that slides. A thread moves
// entire columns, each from front to back, so no two threads access the same bytes and a state may
// slide within its own block. With contiguous columns (layout DS) adjacent columns are only a few
// bytes apart, and lanes that iterate along them waste most of each memory transaction: between
// different blocks, a warp instead moves its columns as one run of bytes.
#include <algorithm>
#include <numeric>
#include <string>

#include "common/cuda_check.h"
#include "common/error_ring.cuh"
#include "common/error_scope.h"
#include "recurrent/align_states.h"

namespace jaxkv::recurrent {
namespace {

constexpr uint32_t kThreads = 512;  // of the one thread block per SM
constexpr uint32_t kLanes = 32;
constexpr uint32_t kWarps = kThreads / kLanes;
constexpr uint32_t kBytesInFlight = 128;  // per thread; with more, registers spill

// Arrays of the same geometry. A tile is the share of one warp: some columns of one block.
struct StateGroup {
  uint32_t first_tile;   // offset in the tiles of one row
  uint32_t first_array;  // index in Params::states
  uint32_t tiles;        // per array
  uint32_t columns;
  uint32_t lane_columns;                // per tile and lane
  uint32_t column_stride, word_stride;  // bytes between columns, and between words of a column
  uint32_t words;                       // per column
  uint32_t block_bytes;
  uint32_t word_bytes;
  bool temporal;
  bool contiguous;  // the words of a column are adjacent, and so are the columns
};

struct Params {
  AlignBatch batch;
  ErrorRings* errors;
  uint32_t num_groups;
  uint32_t tiles;  // per row, all arrays
  StateGroup groups[kMaxGeometries];
  std::byte* states[kMaxStates];
};

static_assert(sizeof(Params) <= 4096 - 256, "does not fit the parameters of a kernel");

// A thread's share of a tile.
struct Columns {
  const std::byte* from;
  std::byte* to;
  uint32_t count, stride;       // columns, and bytes between them
  uint32_t words, word_stride;  // words of a column that are moved, and bytes between them
};

template <typename Word>
__device__ void move_columns(const Columns& c) {
  constexpr uint32_t kInFlight =
      sizeof(Word) * 8 < kBytesInFlight ? 8 : kBytesInFlight / sizeof(Word);
  uint32_t column = 0, word = 0;
  for (uint32_t left = c.count * c.words; left > 0; left -= min(left, kInFlight)) {
    Word loaded[kInFlight];
    uint32_t offsets[kInFlight];
#pragma unroll
    for (uint32_t u = 0; u < kInFlight; ++u) {
      offsets[u] = column * c.stride + word * c.word_stride;
      if (u < left) loaded[u] = __ldcs(reinterpret_cast<const Word*>(c.from + offsets[u]));
      if (++word == c.words) {
        word = 0;
        ++column;
      }
    }
#pragma unroll
    for (uint32_t u = 0; u < kInFlight; ++u) {
      if (u < left) __stcs(reinterpret_cast<Word*>(c.to + offsets[u]), loaded[u]);
    }
  }
}

// A warp's share of contiguous columns; source and destination do not overlap.
struct Run {
  const std::byte* from;
  std::byte* to;
  int32_t bytes, readable;  // length of the run, and bytes from its front to the end of the block
  int32_t column_bytes, bias;  // the last `bias` bytes of every column keep their contents
};

// Shifts all bytes by `bias` towards the front, except those that would be taken from the next
// column: these are read and written back unchanged, because writing part of a memory sector costs
// more than reading it. Not inlined: its registers would make the code paths of other states spill.
__device__ __noinline__ void move_run(const Run& r) {
  constexpr int32_t kWord = sizeof(uint32_t), kStride = kLanes * kWord;
  constexpr int32_t kInFlight = kBytesInFlight / 2 / kWord;
  const int32_t words = r.bias / kWord * kWord, shift = r.bias % kWord * 8;
  const int32_t lane = threadIdx.x % kLanes;
  int32_t in_column = lane * kWord % r.column_bytes;
  for (int32_t first = 0; first < r.bytes; first += kInFlight * kStride) {
    const int32_t at = first + lane * kWord, left = r.bytes - at;
    const int32_t readable = min(left + 1, r.readable - words - at);
    const auto* from = reinterpret_cast<const uint32_t*>(r.from + at + words);
    auto* to = reinterpret_cast<uint32_t*>(r.to + at);
    uint32_t loaded[kInFlight + 1], old[kInFlight];
#pragma unroll
    for (int32_t u = 0; u <= kInFlight; ++u) {
      loaded[u] = u * kStride < readable ? __ldcs(from + u * kLanes) : 0;
    }
#pragma unroll
    for (int32_t u = 0; u < kInFlight; ++u) old[u] = u * kStride < left ? to[u * kLanes] : 0;
#pragma unroll
    for (int32_t u = 0; u < kInFlight; ++u) {
      // The next word is in the next lane; for the last lane, in the next word of lane 0.
      const uint32_t offered = lane == 0 ? loaded[u + 1] : loaded[u];
      const uint32_t next = __shfl_sync(0xffffffff, offered, (lane + 1) % kLanes);
      const uint32_t moved = __funnelshift_r(loaded[u], next, shift);
      const int32_t second = in_column + kWord / 2;  // upper half of the word
      const int32_t end = r.column_bytes - r.bias;
      const uint32_t low = in_column < end ? moved : old[u];
      const uint32_t high = (second < r.column_bytes ? second : 0) < end ? moved : old[u];
      if (u * kStride < left) __stcs(to + u * kLanes, __byte_perm(low, high, 0x7610));
      in_column += kStride % r.column_bytes;
      if (in_column >= r.column_bytes) in_column -= r.column_bytes;
    }
  }
}

__device__ void move_tile(const Params& p, const StateCopy& move, uint32_t tile) {
  uint32_t g = 0;
  while (g + 1 < p.num_groups && tile >= p.groups[g + 1].first_tile) ++g;
  const StateGroup& group = p.groups[g];
  tile -= group.first_tile;
  const uint32_t bias = group.temporal ? 0 : min(static_cast<uint32_t>(move.bias), group.words);
  const uint32_t begin = tile % group.tiles * group.lane_columns * kLanes;
  const uint32_t first = begin + threadIdx.x % kLanes;
  if (bias == group.words) return;
  std::byte* state = p.states[group.first_array + tile / group.tiles];
  const int64_t block_bytes = group.block_bytes;
  const int64_t source = group.temporal ? move.temporal_source : move.source;
  if (group.contiguous && move.source != move.destination) {
    const uint32_t offset = begin * group.column_stride;
    const uint32_t columns = min(group.lane_columns * kLanes, group.columns - begin);
    return move_run({
        .from = state + source * block_bytes + offset,
        .to = state + move.destination * block_bytes + offset,
        .bytes = static_cast<int32_t>(columns * group.column_stride),
        .readable = static_cast<int32_t>(group.block_bytes - offset),
        .column_bytes = static_cast<int32_t>(group.column_stride),
        .bias = static_cast<int32_t>(bias * group.word_stride),
    });
  }
  if (first >= group.columns) return;
  const uint32_t offset = first * group.column_stride;
  const Columns columns{
      .from = state + source * block_bytes + offset + bias * group.word_stride,
      .to = state + move.destination * block_bytes + offset,
      .count = min(group.lane_columns, (group.columns - first + kLanes - 1) / kLanes),
      .stride = kLanes * group.column_stride,
      .words = group.words - bias,
      .word_stride = group.word_stride,
  };
  switch (group.word_bytes) {
    case 16:
      return move_columns<uint4>(columns);
    case 8:
      return move_columns<uint2>(columns);
    case 4:
      return move_columns<uint32_t>(columns);
    case 2:
      return move_columns<uint16_t>(columns);
    default:
      return move_columns<uint8_t>(columns);
  }
}

// Adjacent tiles go to different SMs, so that a small number of tiles is spread over all SMs.
__device__ void move_states(const Params& p, const StateCopy* moves, uint32_t num_moves) {
  const uint32_t warp = threadIdx.x / kLanes * gridDim.x + blockIdx.x;
  const uint32_t warps = gridDim.x * kWarps;
  uint32_t tile = warp % p.tiles;
  for (uint32_t m = warp / p.tiles; m < num_moves; m += warps / p.tiles) {
    move_tile(p, moves[m], tile);
    tile += warps % p.tiles;
    if (tile >= p.tiles) {
      tile -= p.tiles;
      ++m;
    }
  }
}

// Thread block 0 also writes the row's accepted count and records faults. Returns whether the row's
// states are copied.
__device__ bool decide(const Params& p, int32_t row, StateCopy* move) {
  if (row >= p.batch.num_rows) return false;
  const int32_t accepted = p.batch.num_accepted[row];
  const AlignPlan plan = plan_row(p.batch, row, *p.batch.num_reqs, accepted);
  const bool reports = blockIdx.x == 0;
  const bool moves = plan.valid && find_blocks(p.batch, row, plan, move, [&](auto... fault) {
                       if (reports) record_error(p.errors, fault...);
                     });
  if (reports) p.batch.accepted_out[row] = moves && plan.reset ? 1 : accepted;
  return moves && plan.copies;
}

// Compacts the moves of all threads in thread order; returns their number.
__device__ uint32_t list(bool moves, const StateCopy& move, StateCopy* listed) {
  __shared__ uint32_t counts[kWarps];
  const uint32_t warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const uint32_t all = 0xffffffff, ballot = __ballot_sync(all, moves);
  if (lane == 0) counts[warp] = __popc(ballot);
  __syncthreads();
  const uint32_t count = lane < kWarps ? counts[lane] : 0;
  const uint32_t before = __reduce_add_sync(all, lane < warp ? count : 0);
  if (moves) listed[before + __popc(ballot & ((1u << lane) - 1))] = move;
  __syncthreads();
  return __reduce_add_sync(all, count);
}

__global__ void __launch_bounds__(kThreads, 1) align_states(const __grid_constant__ Params p) {
  static_assert(kWarps <= kLanes);
  __shared__ StateCopy listed[kThreads];
  for (int64_t first = 0; first < p.batch.num_rows; first += kThreads) {
    StateCopy move;
    const bool moves = decide(p, static_cast<int32_t>(first + threadIdx.x), &move);
    move_states(p, listed, list(moves, move, listed));
    __syncthreads();
  }
}

// ---------------------------------------------------------------------------------------------
// Launch

// Column layout of a geometry, with the widest words that all addresses allow.
StateGroup columns_of(const StateGeometry& g, uint32_t word_bytes, uint32_t alignment) {
  StateGroup group{};
  group.block_bytes = static_cast<uint32_t>(g.block_bytes());
  group.word_bytes = word_bytes;
  group.temporal = g.temporal != 0;
  if (g.temporal) {
    // No axis slides: the columns are chosen for the number of loads in flight.
    const uint32_t words = group.block_bytes / word_bytes;
    group.words = std::gcd(words, kBytesInFlight / word_bytes);
    group.columns = words / group.words;
    group.column_stride = word_bytes;
    group.word_stride = group.columns * word_bytes;
  } else {
    const auto inner = static_cast<uint32_t>(g.inner_bytes);
    group.words = static_cast<uint32_t>(g.width);
    group.columns = static_cast<uint32_t>(g.outer * (inner / word_bytes));
    group.column_stride = g.outer == 1 ? word_bytes : group.words * word_bytes;
    group.word_stride = inner;
    group.contiguous = g.outer > 1 && inner % sizeof(uint16_t) == 0 &&
                       alignment % sizeof(uint32_t) == 0 &&
                       group.block_bytes % sizeof(uint32_t) == 0;
  }
  group.lane_columns = std::max(1u, kBytesInFlight / (group.words * word_bytes));
  const uint32_t tile_columns = group.lane_columns * kLanes;
  group.tiles = (group.columns + tile_columns - 1) / tile_columns;
  return group;
}

// Largest power of two, at most 16, that divides all addresses.
uint32_t alignment_of(const std::vector<std::byte*>& states) {
  uint64_t bits = 16;
  for (const std::byte* state : states) bits |= reinterpret_cast<uintptr_t>(state);
  return static_cast<uint32_t>(bits & -bits);
}

// Groups the arrays by geometry.
ffi::Error fill_groups(const AlignCall& call, Params* p) {
  const auto geometries = different_geometries(call.geometry);
  uint64_t arrays = 0, tiles = 0;
  for (const auto& geometry : geometries) {
    std::vector<std::byte*> states;
    for (size_t s = 0; s < call.states.size(); ++s) {
      if (call.geometry[s] == geometry) states.push_back(call.states[s]);
    }
    const uint32_t alignment = alignment_of(states);
    const auto unit =
        static_cast<uint64_t>(geometry.temporal ? geometry.block_bytes() : geometry.inner_bytes);
    const auto width = static_cast<uint32_t>(std::gcd<uint64_t>(unit, alignment));
    if (!geometry.temporal && geometry.outer > 1 && width != geometry.inner_bytes) {
      return ffi::Error::InvalidArgument(
          "jaxkv recurrent states: an array is not aligned for its elements");
    }
    StateGroup group = columns_of(geometry, width, alignment);
    group.first_tile = static_cast<uint32_t>(tiles);
    group.first_array = static_cast<uint32_t>(arrays);
    std::ranges::copy(states, p->states + arrays);
    p->groups[p->num_groups++] = group;
    arrays += states.size();
    tiles += uint64_t{group.tiles} * states.size();
  }
  if (tiles > INT32_MAX) {
    return ffi::Error::InvalidArgument("jaxkv recurrent states: " + std::to_string(tiles) +
                                       " tiles in a row, at most " + std::to_string(INT32_MAX));
  }
  p->tiles = static_cast<uint32_t>(tiles);
  return ffi::Error::Success();
}

// Everything that may allocate memory or load a module is done before the first execution.
ffi::Error prepare(int32_t device, ffi::RemainingArgs, ffi::RemainingRets,
                   ffi::Dictionary attributes) {
  cudaFuncAttributes loaded;
  JAXKV_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&loaded, align_states));
  return prepare_rings(device, scope_of_call(attributes));
}

ffi::Error align_states_cuda(cudaStream_t stream, int32_t device, ffi::RemainingArgs args,
                             ffi::RemainingRets rets, ffi::Dictionary attributes) {
  const auto call = decode_align(args, rets, attributes);
  if (!call.has_value()) return call.error();
  Params p{};
  p.batch = call->batch;
  p.errors = device_rings(device, call->scope);
  if (auto error = fill_groups(*call, &p); error.failure()) return error;
  int sms = 0;
  JAXKV_RETURN_IF_CUDA_ERROR(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  const uint64_t max_tiles = uint64_t{p.tiles} * p.batch.num_rows;
  const auto blocks =
      static_cast<uint32_t>(std::clamp<uint64_t>((max_tiles + kWarps - 1) / kWarps, 1, sms));
  align_states<<<blocks, kThreads, 0, stream>>>(p);
  JAXKV_RETURN_IF_CUDA_ERROR(cudaGetLastError());
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    PrepareAlign, prepare,
    ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(AlignStatesKernel, align_states_cuda,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxkv::recurrent
