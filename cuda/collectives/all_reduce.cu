// The CUDA backend of the all-reduce: kernels, launch and FFI handlers.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "collectives/grid.h"
#include "common/cuda_check.h"
#include "common/device.h"
#include "common/ptx.cuh"

namespace jaxkv::collectives {
namespace {

namespace ffi = xla::ffi;

// More ranks need more registers and fewer threads, since each thread sends a word to each peer. A
// tiled call needs even more registers, to keep many loads in flight, and has few blocks.
constexpr int blocks_per_processor(int world_size, Route route) {
  return route == Route::kTiled ? 1 : world_size <= 4 ? 4 : 2;
}

__device__ uint4* vector_at(Word* word) { return reinterpret_cast<uint4*>(word); }
__device__ const uint4* vector_at(const Word* word) { return reinterpret_cast<const uint4*>(word); }
__device__ uint4 vector_of(const Word& w) { return {w.part[0], w.part[1], w.part[2], w.part[3]}; }
__device__ Word word_of(const uint4& v) { return {{v.x, v.y, v.z, v.w}}; }

struct CudaMachine {
  static constexpr uint32_t kPollsPerCheck = 256;
  static __device__ uint64_t block() { return blockIdx.x; }
  static __device__ uint64_t num_blocks() { return gridDim.x; }
  static __device__ int thread() { return threadIdx.x; }
  static __device__ int num_threads() { return kThreads; }
  static __device__ void sync() { __syncthreads(); }
  static __device__ void publish() { __threadfence_system(); }
  static __device__ bool all(bool mine) { return __syncthreads_and(mine); }
  static __device__ void pause() {}
  // Prevents the compiler from recomputing the address at each use.
  static __device__ Word* keep(Word* address) { return ptx::opaque(address); }
  static __device__ uint64_t nanoseconds() { return ptx::globaltimer_ns(); }

  static __device__ Word load(const Word* from) { return word_of(*vector_at(from)); }
  static __device__ void store(Word* to, const Word& w) { *vector_at(to) = vector_of(w); }
  static __device__ void prefetch(const void* from) { ptx::prefetch_l2(from); }
  // Bypasses the L1 cache, which may still contain earlier data of the same buffer.
  static __device__ Word load_received(const Word* from) {
    return word_of(__ldcg(vector_at(from)));
  }

  // Each 32-bit part is atomic, which is sufficient for a word that signals its own arrival.
  static __device__ void send(Word* to, const Word& w) {
    ptx::store_volatile(vector_at(to), vector_of(w));
  }
  static __device__ Word receive(const Word* from) {
    return word_of(ptx::load_volatile(vector_at(from)));
  }

  // Multicast: the NVLink switch reduces or broadcasts the word of all ranks. A word has two
  // addresses, a local one and a multicast one.
  template <class Element>
  static __device__ Word load_multicast_sum(const RankView& v, uint64_t i) {
    return word_of(Element::load_multicast_sum(v.multicast_staged.address + i * sizeof(Word)));
  }
  static __device__ void store_multicast(const RankView& v, uint64_t i, const Word& w) {
    ptx::multimem_store(v.multicast_staged.address + i * sizeof(Word), vector_of(w));
  }
  static __device__ void alias() { ptx::fence_proxy_alias(); }

  template <class T>
  static __device__ void store_release(T* to, T value) {
    ptx::store_release_sys(to, value);
  }
  static __device__ uint64_t load_acquire(const uint64_t* from) {
    return ptx::load_acquire_sys(from);
  }
  template <class T>
  static __device__ T peek(const T* from) {
    return *reinterpret_cast<const volatile T*>(from);
  }
  static __device__ void post(uint64_t* to, uint64_t value) {
    *reinterpret_cast<volatile uint64_t*>(to) = value;
  }
  static __device__ bool try_claim(uint32_t* word) { return atomicExch(word, 1) == 0; }
  // Returns the number of blocks of the call that entered before; the last block resets the counter
  // to 0.
  static __device__ uint32_t enter(uint32_t* entered) { return atomicInc(entered, gridDim.x - 1); }
};

struct Float32 {
  using Bits = uint32_t;
  static constexpr int kLanes = 4;
  static constexpr uint32_t kSubstituteNan = 0x7FC00000;
  static __device__ float lane(const Word& w, int k) { return __uint_as_float(w.part[k]); }
  static __device__ Word word(const float* lanes) {
    Word w;
    for (int k = 0; k < kLanes; ++k) w.part[k] = __float_as_uint(lanes[k]);
    return w;
  }
  static __device__ uint4 load_multicast_sum(uintptr_t from) {
    return ptx::multimem_load_add_f32(from);
  }
};

template <class Half>
struct TwoByte {
  using Bits = uint16_t;
  static constexpr int kLanes = 8;
  static constexpr uint32_t kSubstituteNan = 0x7FFF7FFF;
  static __device__ float lane(const Word& w, int k) {
    return Half::widen(static_cast<uint16_t>(w.part[k / 2] >> (16 * (k % 2))));
  }
  static __device__ Word word(const float* lanes) {
    Word w;
    for (int p = 0; p < 4; ++p) {
      w.part[p] = uint32_t{Half::narrow(lanes[2 * p + 1])} << 16 | Half::narrow(lanes[2 * p]);
    }
    return w;
  }
};

struct Bfloat16 : TwoByte<Bfloat16> {
  static __device__ float widen(uint16_t bits) { return __uint_as_float(uint32_t{bits} << 16); }
  static __device__ uint16_t narrow(float value) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));
  }
  static __device__ uint4 load_multicast_sum(uintptr_t from) {
    return ptx::multimem_load_add_bf16(from);
  }
};

struct Float16 : TwoByte<Float16> {
  static __device__ float widen(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
  static __device__ uint16_t narrow(float value) {
    return __half_as_ushort(__float2half_rn(value));
  }
  static __device__ uint4 load_multicast_sum(uintptr_t from) {
    return ptx::multimem_load_add_f16(from);
  }
};

template <class Element, int N, Route kRoute>
__global__ void __launch_bounds__(kThreads, blocks_per_processor(N, kRoute))
    all_reduce_kernel(const __grid_constant__ RankView view,
                      const __grid_constant__ Message message) {
  const CudaMachine machine;
  Call<CudaMachine, Element, N>(machine, view, message).template run<kRoute>();
}

using Kernel = void (*)(RankView, Message);

template <class Element>
Kernel kernel_for(int world_size, Route route) {
  Kernel kernel = nullptr;
  with_world_size(world_size, [&]<int N>() {
    with_route(route, [&]<Route kRoute>() { kernel = all_reduce_kernel<Element, N, kRoute>; });
  });
  return kernel;
}

Kernel kernel_for(int world_size, ffi::DataType dtype, Route route) {
  return dtype == ffi::F32    ? kernel_for<Float32>(world_size, route)
         : dtype == ffi::BF16 ? kernel_for<Bfloat16>(world_size, route)
                              : kernel_for<Float16>(world_size, route);
}

cudaError_t launch(cudaStream_t stream, const Task& task) {
  const Geometry& geometry = task.communicator->geometry();
  const Kernel kernel =
      kernel_for(geometry.world_size, task.message.dtype, route_of(task.message, geometry));
  const int blocks = blocks_for(task.message, geometry, task.communicator->block_limits());
  kernel<<<blocks, kThreads, 0, stream>>>(task.rank->view, task.message);
  return cudaGetLastError();
}

ffi::Error all_reduce(cudaStream_t stream, int32_t device, ffi::AnyBuffer in, ffi::AnyBuffer,
                      ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer>,
                      int64_t communicator, int64_t algorithm, int64_t signature) {
  const auto task = resolve_task(device, in, out, communicator, algorithm, signature);
  if (!task.has_value()) return task.error();
  JAXKV_RETURN_IF_CUDA_ERROR(launch(stream, *task));
  return ffi::Error::Success();
}

// XLA calls the initialize stage before every execution, including the replay of a CUDA graph.
ffi::Error prepare(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary attributes) {
  const auto communicator = attributes.get<int64_t>("communicator");
  if (!communicator.has_value()) return communicator.error();
  const auto found = usable_communicator(*communicator);
  return found.has_value() ? ffi::Error::Success() : found.error();
}

}  // namespace

BlockLimits load_all_reduce(int32_t device, int world_size) {
  const DeviceGuard current(device);
  int processors = 0;
  JAXKV_CHECK_CUDA(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  BlockLimits limits(kRoutes, kMaxBlocks);
  for (int route = 0; route < kRoutes; ++route) {
    for (const int ranks : {2, 4, 6, 8}) {
      for (const ffi::DataType dtype : {ffi::F32, ffi::BF16, ffi::F16}) {
        const Kernel kernel = kernel_for(ranks, dtype, static_cast<Route>(route));
        cudaFuncAttributes attributes;  // the query loads the kernel
        JAXKV_CHECK_CUDA(cudaFuncGetAttributes(&attributes, kernel));
        if (ranks != world_size) continue;
        int blocks = 0;
        JAXKV_CHECK_CUDA(
            cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, 0));
        limits[route] = std::min(limits[route], resident_limit(blocks, processors));
      }
    }
  }
  return limits;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(PrepareAllReduce, prepare,
                              ffi::Ffi::BindInitialize().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(AllReduceKernel, all_reduce,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("communicator")
                                  .Attr<int64_t>("algorithm")
                                  .Attr<int64_t>("signature"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxkv::collectives
