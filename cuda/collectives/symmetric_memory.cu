// Symmetric memory of CUDA devices: peer access within a process, CUDA IPC between processes.
#include <cuda_runtime.h>

#include <cstring>
#include <stdexcept>

#include "collectives/symmetric_memory.h"

namespace jaxkv::collectives {
namespace {

void check(cudaError_t status, const std::string& what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  throw std::runtime_error("jaxkv: symmetric memory: " + what + ": " + cudaGetErrorString(status));
}

class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    check(cudaSetDevice(device), "device " + std::to_string(device));
  }
  ~DeviceGuard() { (void)cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

void enable_access(int device, int peer) {
  const std::string pair = "device " + std::to_string(device) + " to " + std::to_string(peer);
  int possible = 0;
  check(cudaDeviceCanAccessPeer(&possible, device, peer), pair);
  if (!possible) throw std::runtime_error("jaxkv: symmetric memory: no peer access from " + pair);
  const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {
    (void)cudaGetLastError();
  } else {
    check(status, "peer access from " + pair);
  }
}

// At process exit the driver may already be shut down, and has then released all memory.
template <class Body>
void unless_shut_down(Body body) {
  try {
    body();
  } catch (const std::runtime_error&) {
  }
  (void)cudaGetLastError();
}

// cudaMalloc suballocates from blocks of this size, and an IPC handle refers to the entire block.
constexpr size_t kBlockBytes = 2 << 20;

class CudaCommunicator : public Communicator {
 public:
  using Communicator::Communicator;

  ~CudaCommunicator() override {
    unmap();  // waits for the devices first: peers of this process write to all memory
    multicast_.clear();
    unless_shut_down([&] {
      for_each_local([](Rank& rank) {
        DeviceGuard on(rank.device);
        (void)cudaFree(rank.header());
        (void)cudaFreeHost(rank.view.fault);
      });
    });
  }

  void unmap() override {
    unless_shut_down([&] {
      for_each_local([](Rank& rank) {
        DeviceGuard on(rank.device);
        (void)cudaDeviceSynchronize();  // status ignored: a failed device does not write any more
      });
      for (const auto& [device, memory] : peer_memory_) {
        DeviceGuard on(device);
        (void)cudaIpcCloseMemHandle(memory);
      }
    });
    peer_memory_.clear();
  }

  void preset(uint64_t epoch, uint64_t ahead) override {
    const Header header = header_after(epoch, ahead);
    for_each_local([&](Rank& rank) {
      DeviceGuard on(rank.device);
      // Not on the legacy stream, whose use fails while another thread captures a graph.
      cudaStream_t stream = nullptr;
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
      check(cudaMemcpyAsync(rank.header(), &header, sizeof header, cudaMemcpyHostToDevice, stream),
            "preset");
      check(cudaMemsetAsync(mail_of(rank.header()), ahead ? 0 : 0xFF,
                            geometry_.all_ll_words() * sizeof(Word), stream),
            "preset");
      check(cudaStreamSynchronize(stream), "preset");
      check(cudaStreamDestroy(stream), "cudaStreamDestroy");
    });
  }

 protected:
  Header* allocate_memory(Rank& rank, const std::vector<int32_t>& peer_devices) override {
    DeviceGuard on(rank.device);
    for (const int32_t peer : peer_devices) {
      if (peer != rank.device) enable_access(rank.device, peer);
    }
    // Mapped host memory: written only when a wait times out, read by the host without a sync.
    check(cudaHostAlloc(&rank.view.fault, sizeof(PeerFault),
                        cudaHostAllocPortable | cudaHostAllocMapped),
          "host memory");
    *rank.view.fault = {};
    const size_t bytes = (memory_bytes() + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes),
          std::to_string(bytes) + " bytes on device " + std::to_string(rank.device));
    return static_cast<Header*>(memory);
  }

  Handle handle_of(const Rank& rank) override {
    if (!spans_processes()) return {};
    DeviceGuard on(rank.device);
    cudaIpcMemHandle_t handle;
    check(cudaIpcGetMemHandle(&handle, rank.header()),
          "handle of the memory of device " + std::to_string(rank.device));
    const auto* bytes = reinterpret_cast<const uint8_t*>(&handle);
    return Handle(bytes, bytes + sizeof handle);
  }

  void allocate_multicast(const std::vector<std::unique_ptr<Rank>>& group) override {
    std::vector<int32_t> devices;
    for (const auto& rank : group) devices.push_back(rank->device);
    const auto& memory = multicast_.emplace_back(
        std::make_unique<MulticastMemory>(devices, geometry_.multicast_words * sizeof(Word)));
    for (size_t i = 0; i < group.size(); ++i) {
      group[i]->view.staged = static_cast<Word*>(memory->of_device(i));
      group[i]->view.all_staged = memory->of_all(i);
    }
  }

  // Mapped once per device, with peer access to the device that owns it.
  Header* map_memory(const Rank& rank, const Handle& bytes) override {
    DeviceGuard on(rank.device);
    cudaIpcMemHandle_t handle;
    if (bytes.size() != sizeof handle) throw std::runtime_error("jaxkv: not a handle of memory");
    std::memcpy(&handle, bytes.data(), sizeof handle);
    void* memory = nullptr;
    check(cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess),
          "memory of another process on device " + std::to_string(rank.device));
    peer_memory_.emplace_back(rank.device, memory);
    return static_cast<Header*>(memory);
  }

 private:
  std::vector<std::pair<int32_t, void*>> peer_memory_;       // with the device that maps it
  std::vector<std::unique_ptr<MulticastMemory>> multicast_;  // one per group
};

}  // namespace

std::shared_ptr<Communicator> make_cuda_communicator(Geometry geometry,
                                                     const ByRank<int32_t>& devices,
                                                     uint64_t timeout_ns) {
  auto communicator = std::make_shared<CudaCommunicator>(geometry, devices, timeout_ns);
  communicator->allocate();
  return communicator;
}

}  // namespace jaxkv::collectives
