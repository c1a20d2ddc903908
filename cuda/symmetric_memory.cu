// Symmetric memory of the CUDA devices of one process, over peer access.
#include <cuda_runtime.h>

#include <stdexcept>

#include "symmetric_memory.h"

namespace jaxkv {
namespace {

void check(cudaError_t status, const std::string& what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  throw std::runtime_error("jaxkv: symmetric memory: " + what + ": " + cudaGetErrorString(status));
}

class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    check(cudaSetDevice(device), "device " + std::to_string(device));
  }
  ~OnDevice() { (void)cudaSetDevice(before_); }

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

class CudaCommunicator : public Communicator {
 public:
  using Communicator::Communicator;

  void allocate() {
    for (auto& group : groups_) {
      for (size_t i = 0; i < group.size(); ++i) {
        Rank& rank = *group[i];
        OnDevice on(rank.device);
        for (auto& peer : group) {
          if (peer != group[i]) enable_access(rank.device, peer->device);
        }
        const size_t bytes = sizeof(Header) + geometry_.mail_words() * sizeof(Word);
        void* memory = nullptr;
        check(cudaMalloc(&memory, bytes),
              std::to_string(bytes) + " bytes on device " + std::to_string(rank.device));
        for (auto& peer : group) peer->view.headers[i] = static_cast<Header*>(memory);
        // Mapped host memory: written only when a wait gives up, read by the host without a sync.
        check(cudaHostAlloc(&rank.view.fault, sizeof(PeerFault),
                            cudaHostAllocPortable | cudaHostAllocMapped),
              "host memory");
        *rank.view.fault = {};
      }
    }
    preset(0, 0);
  }

  ~CudaCommunicator() override {
    try {
      for_each([](Rank&, Header*) { (void)cudaDeviceSynchronize(); });  // peers write to all
      for_each([](Rank& rank, Header* memory) {
        (void)cudaFree(memory);
        (void)cudaFreeHost(rank.view.fault);
      });
    } catch (const std::runtime_error&) {
      // The driver is gone, and all memory with it: the process ends.
    }
    (void)cudaGetLastError();
  }

  void preset(uint64_t epoch, uint64_t ahead) override {
    const Header header = preset_header(epoch, ahead);
    for_each([&](Rank&, Header* memory) {
      // On no legacy stream, which another thread's capture forbids.
      cudaStream_t stream = nullptr;
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
      cudaMemcpyAsync(memory, &header, sizeof header, cudaMemcpyHostToDevice, stream);
      cudaMemsetAsync(mail_of(memory), ahead ? 0 : 0xFF, geometry_.all_quick_words() * sizeof(Word),
                      stream);
      check(cudaStreamSynchronize(stream), "preset");
      check(cudaStreamDestroy(stream), "cudaStreamDestroy");
    });
  }

 private:
  template <class Body>
  void for_each(Body body) {
    for (auto& group : groups_) {
      for (auto& rank : group) {
        OnDevice on(rank->device);
        body(*rank, rank->view.headers[rank->view.rank]);
      }
    }
  }
};

}  // namespace

std::shared_ptr<Communicator> make_cuda_communicator(
    Geometry geometry, const std::vector<std::vector<int32_t>>& devices, uint64_t timeout_ns) {
  auto communicator = std::make_shared<CudaCommunicator>(geometry, devices, timeout_ns);
  communicator->allocate();
  return communicator;
}

}  // namespace jaxkv
