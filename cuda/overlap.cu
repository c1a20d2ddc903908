// Copies that run beside XLA's stream, and the waits for them.
#include <cuda.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <unordered_map>

#include "copy_kernel.h"
#include "cuda_check.h"
#include "device.h"
#include "overlap.h"
#include "page_errors.cuh"

namespace jaxkv {
namespace {

constexpr uint32_t kNumLanes = 4;  // load and store, kernel and copy engine
constexpr size_t kLaneWords = 1 + kMaxSegments;

struct DeviceLanes {
  std::array<Lane, kNumLanes> lanes;
  uint32_t* words = nullptr;  // kLaneWords for each lane
};

std::array<std::atomic<DeviceLanes*>, kMaxDevices> all_lanes;

// ---------------------------------------------------------------------------------------------
// Writing words from a stream, without a kernel

using WriteValue32 = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);
using WriteValue64 = CUresult (*)(CUstream, CUdeviceptr, cuuint64_t, unsigned int);

// Through the runtime, as the extension must load where there is no driver.
template <typename Function>
Function driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  constexpr unsigned int kVersion = 12000;
  if (cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &result) !=
          cudaSuccess ||
      result != cudaDriverEntryPointSuccess) {
    (void)cudaGetLastError();
    return nullptr;
  }
  return reinterpret_cast<Function>(found);
}

struct StreamWrites {
  WriteValue32 word = driver_function<WriteValue32>("cuStreamWriteValue32");
  WriteValue64 two_words = driver_function<WriteValue64>("cuStreamWriteValue64");
};

const StreamWrites& stream_writes() {
  static const StreamWrites writes;
  return writes;
}

ffi::Error write_error(CUresult status) {
  if (status == CUDA_SUCCESS) return ffi::Error::Success();
  return ffi::Error::Internal("jaxkv: a write from a stream failed: CUresult " +
                              std::to_string(status));
}

// ---------------------------------------------------------------------------------------------
// Tickets: which copy a wait is about

struct StartedCopy {
  uintptr_t ticket = 0;
  cudaEvent_t ended = nullptr;
  std::vector<const void*> written;

  StartedCopy() = default;
  StartedCopy(const StartedCopy&) = delete;
  ~StartedCopy() {
    if (ended) cudaEventDestroy(ended);
  }
};

constexpr size_t kMaxTickets = 4096;  // XLA puts them at few addresses

struct Tickets {
  std::mutex mutex;
  // Also by the address of the tickets that waits hand on.
  std::unordered_map<uintptr_t, std::shared_ptr<StartedCopy>> by_address;
};

Tickets& tickets() {
  static auto* all = new Tickets;  // leaked: handlers may outlive static objects
  return *all;
}

std::shared_ptr<StartedCopy> find_copy(uintptr_t address) {
  auto& [mutex, by_address] = tickets();
  std::lock_guard lock(mutex);
  const auto found = by_address.find(address);
  return found == by_address.end() ? nullptr : found->second;
}

void name_copy(uintptr_t address, std::shared_ptr<StartedCopy> copy) {
  auto& [mutex, by_address] = tickets();
  std::lock_guard lock(mutex);
  if (by_address.size() >= kMaxTickets) {
    std::erase_if(by_address, [](const auto& entry) {
      return cudaEventQuery(entry.second->ended) == cudaSuccess;
    });
    (void)cudaGetLastError();
  }
  by_address[address] = std::move(copy);
}

ffi::ErrorOr<std::shared_ptr<StartedCopy>> new_copy(uintptr_t address, ffi::RemainingRets rets) {
  auto copy = find_copy(address);
  // One that another ticket's wait left here still belongs to that ticket.
  if (!copy || copy->ticket != address) {
    copy = std::make_shared<StartedCopy>();
    copy->ticket = address;
    if (cudaEventCreateWithFlags(&copy->ended, cudaEventDisableTiming) != cudaSuccess) {
      (void)cudaGetLastError();
      return ffi::Unexpected(ffi::Error::Internal("jaxkv: no CUDA event for a started copy"));
    }
  }
  copy->written.clear();
  for (size_t i = 0; i < rets.size(); ++i) {
    auto array = rets.get<ffi::AnyBuffer>(i);
    if (!array.has_value()) return ffi::Unexpected(array.error());
    copy->written.push_back((*array)->untyped_data());
  }
  return copy;
}

// ---------------------------------------------------------------------------------------------
// The wait

struct WaitParams {
  const Ticket* ticket;
  Ticket* next_ticket;  // null if no wait follows
  const uint32_t* lane_words;
  int32_t segment;  // -1 to wait for nothing
  uint64_t timeout_ns;
  PageErrorRing* errors;
};

__device__ uint32_t load_acquire(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__global__ void wait_for_segment(const __grid_constant__ WaitParams p) {
  const Ticket ticket = *p.ticket;
  if (p.next_ticket) *p.next_ticket = ticket;
  if (p.segment < 0) return;
  const uint32_t* counter = p.lane_words + (ticket.lane % kNumLanes) * kLaneWords;
  const uint32_t wanted = ticket.first + static_cast<uint32_t>(p.segment);
  const uint64_t deadline = nanoseconds() + p.timeout_ns;
  uint32_t seen = load_acquire(counter);
  while (static_cast<int32_t>(seen - wanted) < 0) {  // counters wrap
    if (nanoseconds() > deadline) {
      record_fault(p.errors, PageFault::kNotArrived, p.segment, static_cast<int32_t>(wanted),
                   static_cast<int32_t>(seen));
      return;
    }
    __nanosleep(100);
    seen = load_acquire(counter);
  }
}

ffi::Error wait_for_copy(cudaStream_t stream, int32_t device, ffi::Buffer<ffi::S32> ticket,
                         ffi::RemainingArgs, ffi::RemainingRets rets, ffi::Dictionary attributes) {
  const auto segment = attributes.get<int64_t>("segment");
  const auto timeout_ns = attributes.get<int64_t>("timeout_ns");
  const auto first_array = attributes.get<int64_t>("first_array");
  const auto written = attributes.get<bool>("written");
  if (!segment.has_value() || !timeout_ns.has_value() || !first_array.has_value() ||
      !written.has_value()) {
    return ffi::Error::InvalidArgument("jaxkv wait: an attribute is missing or of another type");
  }
  const auto copy = find_copy(reinterpret_cast<uintptr_t>(ticket.untyped_data()));
  if (!copy) return ffi::Error::InvalidArgument("jaxkv wait: no copy was started with this ticket");
  Ticket* next_ticket = nullptr;
  for (size_t i = 0; i < rets.size(); ++i) {
    auto result = rets.get<ffi::AnyBuffer>(i);
    if (!result.has_value()) return result.error();
    void* data = (*result)->untyped_data();
    if (static_cast<int64_t>(i) < *first_array) {
      next_ticket = static_cast<Ticket*>(data);
      name_copy(reinterpret_cast<uintptr_t>(data), copy);
    } else if (*written &&
               std::find(copy->written.begin(), copy->written.end(), data) == copy->written.end()) {
      return ffi::Error::InvalidArgument(
          "jaxkv wait: XLA copied an array between its start and its wait, and the copy lacks what "
          "had not arrived; donate the started transfer to the jit that waits for it");
    }
  }
  const WaitParams p{
      .ticket = static_cast<const Ticket*>(ticket.untyped_data()),
      .next_ticket = next_ticket,
      .lane_words = all_lanes[device].load()->words,
      .segment = static_cast<int32_t>(*segment),
      .timeout_ns = static_cast<uint64_t>(*timeout_ns),
      .errors = device_ring(device),
  };
  wait_for_segment<<<1, 1, 0, stream>>>(p);
  JAXKV_CUDA_TRY(cudaGetLastError());
  return ffi::Error::Success();
}

// ---------------------------------------------------------------------------------------------
// Handlers

ffi::Error start_by_kernel(cudaStream_t stream, int32_t device, ffi::Buffer<ffi::S32> planned,
                           ffi::RemainingArgs args, ffi::ResultBuffer<ffi::S32> ticket,
                           ffi::RemainingRets rets, ffi::Dictionary attributes) {
  const auto copy = decode_copy(args, rets, attributes);
  if (!copy.has_value()) return copy.error();
  const auto list = decode_pairs(planned);
  if (!list.has_value()) return list.error();
  auto enqueue = [&](const Lane& lane, uint32_t first, size_t segment_buffers) {
    const Progress progress{lane.counter(), first, lane.arrived(), segment_buffers};
    return launch_copy(lane.stream(), *copy, *list, &progress);
  };
  return start_copy({stream, device, ticket, rets, attributes}, *copy, Engine::kKernel, enqueue);
}

ffi::Error prepare(int32_t device, ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  return prepare_lanes(device);
}

}  // namespace

ffi::Error Lane::create(uint32_t index, uint32_t* words) {
  int least = 0, greatest = 0;
  JAXKV_CUDA_TRY(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  // Before compute, which has work for all SMs at any time, while a copy takes few of them.
  JAXKV_CUDA_TRY(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
  JAXKV_CUDA_TRY(cudaEventCreateWithFlags(&behind_, cudaEventDisableTiming));
  index_ = index;
  words_ = words;
  return ffi::Error::Success();
}

ffi::Error Lane::start(cudaStream_t xla_stream, Ticket* ticket, size_t num_segments,
                       const std::function<ffi::Error(const Lane&, uint32_t)>& enqueue,
                       cudaEvent_t ended) {
  std::lock_guard lock(mutex_);
  const uint32_t first = next_;
  next_ += static_cast<uint32_t>(num_segments);
  JAXKV_CUDA_TRY(cudaEventRecord(behind_, xla_stream));
  JAXKV_CUDA_TRY(cudaStreamWaitEvent(stream_, behind_));
  if (auto error = enqueue(*this, first); error.failure()) return error;
  JAXKV_CUDA_TRY(cudaEventRecord(ended, stream_));
  return write_error(stream_writes().two_words(xla_stream, reinterpret_cast<CUdeviceptr>(ticket),
                                               uint64_t{first} << 32 | index_, 0));
}

ffi::Error Lane::signal(uint32_t value) const {
  return write_error(
      stream_writes().word(stream_, reinterpret_cast<CUdeviceptr>(counter()), value, 0));
}

ffi::Error prepare_lanes(int32_t device) {
  static std::mutex mutex;
  if (auto error = prepare_copy_kernel(device); error.failure()) return error;
  std::lock_guard lock(mutex);
  if (all_lanes[device].load()) return ffi::Error::Success();
  if (!stream_writes().word || !stream_writes().two_words) {
    return ffi::Error::Internal("jaxkv: the driver has no cuStreamWriteValue32");
  }
  cudaFuncAttributes attributes;
  JAXKV_CUDA_TRY(cudaFuncGetAttributes(&attributes, wait_for_segment));
  auto lanes = std::make_unique<DeviceLanes>();
  const size_t bytes = kNumLanes * kLaneWords * sizeof(uint32_t);
  JAXKV_CUDA_TRY(cudaMalloc(&lanes->words, bytes));
  for (uint32_t i = 0; i < kNumLanes; ++i) {
    if (auto error = lanes->lanes[i].create(i, lanes->words + i * kLaneWords); error.failure()) {
      return error;
    }
  }
  // On no legacy stream, which another thread's capture forbids.
  const cudaStream_t stream = lanes->lanes[0].stream();
  JAXKV_CUDA_TRY(cudaMemsetAsync(lanes->words, 0, bytes, stream));
  JAXKV_CUDA_TRY(cudaStreamSynchronize(stream));
  all_lanes[device].store(lanes.release());
  return ffi::Error::Success();
}

ffi::Error start_copy(StartCall call, const BlockCopy& copy, Engine engine,
                      const Enqueue& enqueue) {
  const auto segment_buffers = call.attributes.get<int64_t>("segment_buffers");
  const auto joined = call.attributes.get<bool>("joined");
  if (!segment_buffers.has_value() || !joined.has_value()) {
    return ffi::Error::InvalidArgument("jaxkv start: an attribute is missing or of another type");
  }
  const auto num_buffers = static_cast<int64_t>(copy.dense.size());
  const int64_t step = *segment_buffers;
  if (step < 1 || num_buffers % step || num_buffers / step > static_cast<int64_t>(kMaxSegments) ||
      call.ticket->size_bytes() < sizeof(Ticket)) {
    return ffi::Error::InvalidArgument("jaxkv start: " + std::to_string(num_buffers) +
                                       " buffers in segments of " + std::to_string(step));
  }
  cudaStreamCaptureStatus capture;
  JAXKV_CUDA_TRY(cudaStreamIsCapturing(call.stream, &capture));
  if (capture != cudaStreamCaptureStatusNone) {
    return ffi::Error::Internal("jaxkv: a start cannot be captured in a CUDA graph");
  }
  const auto address = reinterpret_cast<uintptr_t>(call.ticket->untyped_data());
  auto started = new_copy(address, call.written);
  if (!started.has_value()) return started.error();
  const auto index = (copy.to_dense ? 0 : 2) + static_cast<uint32_t>(engine);
  Lane& lane = all_lanes[call.device].load()->lanes[index];
  auto run = [&](const Lane& on, uint32_t first) {
    return enqueue(on, first, static_cast<size_t>(step));
  };
  if (auto error = lane.start(call.stream, reinterpret_cast<Ticket*>(address), num_buffers / step,
                              run, (*started)->ended);
      error.failure()) {
    return error;
  }
  name_copy(address, *started);
  if (*joined) JAXKV_CUDA_TRY(cudaStreamWaitEvent(call.stream, (*started)->ended));
  return ffi::Error::Success();
}

bool copy_ended(uintptr_t address) {
  const auto copy = find_copy(address);
  if (!copy) return true;
  const bool ended = cudaEventQuery(copy->ended) != cudaErrorNotReady;
  (void)cudaGetLastError();
  return ended;
}

using Stream = ffi::PlatformStream<cudaStream_t>;
using Int32s = ffi::Buffer<ffi::S32>;

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    PrepareLanes, prepare,
    ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().RemainingArgs().RemainingRets().Attrs());

// No command-buffer trait: which number a copy gets is known to the host.
XLA_FFI_DEFINE_HANDLER_SYMBOL(StartCopyKernel, start_by_kernel,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<Int32s>()
                                  .RemainingArgs()
                                  .Ret<Int32s>()
                                  .RemainingRets()
                                  .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(WaitCopyKernel, wait_for_copy,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<Int32s>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxkv
