// Symmetric memory of CUDA devices: peer access within a process, CUDA IPC between processes.
#include <cuda_runtime.h>

#include <cstring>
#include <stdexcept>

#include "collectives/symmetric_memory.h"
#include "common/cuda_check.h"
#include "common/device.h"

namespace jaxkv::collectives {
namespace {

// Idempotent.
cudaError_t enable_peer_access(int peer) {
  const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
  if (status != cudaErrorPeerAccessAlreadyEnabled) return status;
  (void)cudaGetLastError();
  return cudaSuccess;
}

void enable_access(int device, int peer) {
  const std::string pair = std::to_string(device) + " to device " + std::to_string(peer);
  const std::string context = "symmetric memory: peer access from device " + pair;
  int possible = 0;
  JAXKV_CHECK_CUDA(cudaDeviceCanAccessPeer(&possible, device, peer), context);
  if (!possible)
    throw std::runtime_error("jaxkv: symmetric memory: no peer access from device " + pair);
  JAXKV_CHECK_CUDA(enable_peer_access(peer), context);
}

std::string memory_of(int device) { return "symmetric memory of device " + std::to_string(device); }

// Cleanup of one device. Its failure must not end that of the others. At process exit the driver
// may already be shut down, and has then released all memory.
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
    for_each_local([](Rank& rank) {
      unless_shut_down([&] {
        const DeviceGuard current(rank.device);
        (void)cudaFree(rank.header());
        (void)cudaFreeHost(rank.view.fault);
      });
    });
  }

  void unmap() override {
    for_each_local([](Rank& rank) {
      // Error ignored: a failed device does not write any more.
      unless_shut_down([&] { synchronize_device(rank.device); });
    });
    for (const auto& mapping : peer_memory_) {
      unless_shut_down([&] {
        const DeviceGuard current(mapping.first);
        (void)cudaIpcCloseMemHandle(mapping.second);
      });
    }
    peer_memory_.clear();
  }

  void initialize(const Header& header, uint32_t ll_value) override {
    const int byte = static_cast<uint8_t>(ll_value);  // all four are equal
    for_each_local([&](Rank& rank) {
      const DeviceGuard current(rank.device);
      // Not on the legacy stream, whose use fails while another thread captures a graph.
      cudaStream_t stream = nullptr;
      JAXKV_CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      JAXKV_CHECK_CUDA(
          cudaMemcpyAsync(rank.header(), &header, sizeof header, cudaMemcpyHostToDevice, stream));
      JAXKV_CHECK_CUDA(cudaMemsetAsync(receive_buffers_of(rank.header()), byte,
                                       geometry_.all_ll_words() * sizeof(Word), stream));
      JAXKV_CHECK_CUDA(cudaStreamSynchronize(stream));
      JAXKV_CHECK_CUDA(cudaStreamDestroy(stream));
    });
  }

 protected:
  Header* allocate_memory(Rank& rank, const std::vector<int32_t>& peer_devices) override {
    const DeviceGuard current(rank.device);
    for (const int32_t peer : peer_devices) {
      if (peer != rank.device) enable_access(rank.device, peer);
    }
    // Mapped host memory: written only when a wait times out, read by the host without a sync.
    JAXKV_CHECK_CUDA(cudaHostAlloc(&rank.view.fault, sizeof(PeerFault),
                                   cudaHostAllocPortable | cudaHostAllocMapped),
                     memory_of(rank.device));
    *rank.view.fault = {};
    const size_t bytes = (memory_bytes() + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    void* memory = nullptr;
    JAXKV_CHECK_CUDA(cudaMalloc(&memory, bytes),
                     memory_of(rank.device) + ", " + std::to_string(bytes) + " bytes");
    return static_cast<Header*>(memory);
  }

  Handle handle_of(const Rank& rank) override {
    if (!spans_processes()) return {};
    const DeviceGuard current(rank.device);
    cudaIpcMemHandle_t handle;
    JAXKV_CHECK_CUDA(cudaIpcGetMemHandle(&handle, rank.header()), memory_of(rank.device));
    const auto* bytes = reinterpret_cast<const uint8_t*>(&handle);
    return Handle(bytes, bytes + sizeof handle);
  }

  void allocate_multicast(const std::vector<std::unique_ptr<Rank>>& group) override {
    std::vector<int32_t> devices;
    for (const auto& rank : group) devices.push_back(rank->device);
    const auto& memory = multicast_.emplace_back(
        std::make_unique<MulticastMemory>(devices, geometry_.multicast_words * sizeof(Word)));
    for (size_t i = 0; i < group.size(); ++i) {
      group[i]->view.staged = static_cast<Word*>(memory->local_address(i));
      group[i]->view.multicast_staged = memory->multicast_address(i);
    }
  }

  // Mapped once per device, with peer access to the device that owns it.
  Header* map_memory(const Rank& rank, const Handle& bytes) override {
    const DeviceGuard current(rank.device);
    cudaIpcMemHandle_t handle;
    if (bytes.size() != sizeof handle) {
      throw std::runtime_error("jaxkv: symmetric memory: handle of " +
                               std::to_string(bytes.size()) + " bytes, expected " +
                               std::to_string(sizeof handle));
    }
    std::memcpy(&handle, bytes.data(), sizeof handle);
    void* memory = nullptr;
    JAXKV_CHECK_CUDA(cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess),
                     memory_of(rank.device) + ", mapping of a peer in another process");
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
