// The all-reduce kernels with all ranks on one GPU: each rank is a stream. So that all blocks of
// all ranks are resident together, a call has at most 1/world_size of the blocks that fit.
//
//   ranks_on_one_gpu [--brief] [--timeout-s SECONDS]
//
// Prints a line of JSON for each check; the exit code is 1 if a result was wrong. Every wait of the
// kernels has a timeout, and the process ends after ten minutes in any case. Built with
// JAXKV_TEST_HOOKS, threads are also delayed within calls.
#include <cuda_runtime.h>
#include <unistd.h>

#include <cstdlib>

#include "all_reduce_checks.h"
#include "collectives/all_reduce.cc"
#include "collectives/all_reduce.cu"

namespace jaxkv::collectives::cases {
namespace {

constexpr uint64_t kLongestDelayNs = 50'000;  // of a rank before a call
constexpr int kReplays = 4;

__global__ void delay(uint64_t nanoseconds) {
  const uint64_t begin = ptx::globaltimer_ns();
  while (ptx::globaltimer_ns() - begin < nanoseconds) {
  }
}

class GpuRanks {
 public:
  GpuRanks(const Geometry& geometry, uint64_t timeout_ns, int max_blocks)
      : streams_(geometry.world_size) {
    const std::vector<int32_t> devices(geometry.world_size, 0);
    communicator_ = make_cuda_communicator(geometry, {devices}, timeout_ns);
    BlockLimits limits = load_all_reduce(0, geometry.world_size);
    for (int32_t& limit : limits) {
      limit = std::clamp(limit / geometry.world_size, 1, max_blocks);
    }
    communicator_->limit_blocks(limits);
    communicator_->for_each_local([&](Communicator::Rank& rank) {
      ranks_.push_back(&rank);
#ifdef JAXKV_TEST_HOOKS
      rank.view.stall_ns = 20'000;
#endif
    });
    for (cudaStream_t& stream : streams_) {
      JAXKV_CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    }
  }
  ~GpuRanks() {
    for (const cudaStream_t stream : streams_) (void)cudaStreamDestroy(stream);
    for (uint8_t* memory : memory_) (void)cudaFree(memory);
  }
  GpuRanks(const GpuRanks&) = delete;
  GpuRanks& operator=(const GpuRanks&) = delete;

  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }

  void run(std::span<const Case> calls, std::vector<Arena>& arenas,
           const std::vector<size_t>& calls_of, bool delays) {
    upload(arenas);
    for (size_t k = 0; k < calls.size(); ++k) {
      for (const size_t rank : in_random_order()) {
        if (k >= calls_of[rank]) continue;
        if (delays && random_() % 4 == 0) {
          delay<<<1, 1, 0, streams_[rank]>>>(random_() % kLongestDelayNs);
        }
        enqueue(calls[k], arenas[rank], k, rank);
      }
    }
    download(arenas);
  }

  // One CUDA graph for each rank, with all its calls.
  std::vector<cudaGraphExec_t> capture(std::span<const Case> calls,
                                       const std::vector<Arena>& arenas) {
    upload(arenas);
    std::vector<cudaGraphExec_t> graphs(arenas.size());
    for (size_t rank = 0; rank < arenas.size(); ++rank) {
      cudaGraph_t graph;
      JAXKV_CHECK_CUDA(cudaStreamBeginCapture(streams_[rank], cudaStreamCaptureModeThreadLocal));
      for (size_t k = 0; k < calls.size(); ++k) enqueue(calls[k], arenas[rank], k, rank);
      JAXKV_CHECK_CUDA(cudaStreamEndCapture(streams_[rank], &graph));
      JAXKV_CHECK_CUDA(cudaGraphInstantiate(&graphs[rank], graph, 0));
      JAXKV_CHECK_CUDA(cudaGraphDestroy(graph));
    }
    return graphs;
  }
  void replay(const std::vector<cudaGraphExec_t>& graphs, std::vector<Arena>& arenas) {
    upload(arenas);
    for (const size_t rank : in_random_order()) {
      delay<<<1, 1, 0, streams_[rank]>>>(random_() % kLongestDelayNs);
      JAXKV_CHECK_CUDA(cudaGraphLaunch(graphs[rank], streams_[rank]));
    }
    download(arenas);
  }

 private:
  void enqueue(const Case& c, const Arena& arena, size_t k, size_t rank) {
    const auto [in, out] = arena.places[k];
    const Task task{communicator_, ranks_[rank],
                    message_of(c, memory_[rank] + in, memory_[rank] + out, k + 1)};
    JAXKV_CHECK_CUDA(launch(streams_[rank], task));
  }

  std::vector<size_t> in_random_order() {
    std::vector<size_t> order(streams_.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random_);
    return order;
  }

  // Arenas of one size each; memory is kept, because captured calls address it.
  void upload(const std::vector<Arena>& arenas) {
    if (size_ < arenas[0].bytes.size()) {
      for (uint8_t* memory : memory_) JAXKV_CHECK_CUDA(cudaFree(memory));
      memory_.assign(arenas.size(), nullptr);
      size_ = arenas[0].bytes.size();
      for (uint8_t*& memory : memory_) JAXKV_CHECK_CUDA(cudaMalloc(&memory, size_));
    }
    for (size_t rank = 0; rank < arenas.size(); ++rank) {
      const auto& bytes = arenas[rank].bytes;
      JAXKV_CHECK_CUDA(
          cudaMemcpy(memory_[rank], bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
    }
    JAXKV_CHECK_CUDA(cudaDeviceSynchronize());
  }
  void download(std::vector<Arena>& arenas) {
    JAXKV_CHECK_CUDA(cudaDeviceSynchronize());
    for (size_t rank = 0; rank < arenas.size(); ++rank) {
      auto& bytes = arenas[rank].bytes;
      JAXKV_CHECK_CUDA(
          cudaMemcpy(bytes.data(), memory_[rank], bytes.size(), cudaMemcpyDeviceToHost));
    }
  }

  std::shared_ptr<Communicator> communicator_;
  std::vector<Communicator::Rank*> ranks_;
  std::vector<cudaStream_t> streams_;
  std::vector<uint8_t*> memory_;
  size_t size_ = 0;
  std::mt19937 random_{3};
};

// Replays of captured calls with other operands each time.
void replays(Checks<GpuRanks>& checks, int world_size, const Settings& settings) {
  GpuRanks ranks(small_geometry(world_size, false), settings.timeout_ns, 5);
  std::vector<Case> calls;
  for (int i = 0; i < 12; ++i) calls.push_back(checks.random_case(ranks));
  auto arenas = arenas_of(calls, world_size);
  const auto graphs = ranks.capture(calls, arenas);
  for (int replay = 0; replay < kReplays; ++replay) {
    for (size_t k = 0; k < calls.size(); ++k) {
      calls[k].seed += 1000;
      for (int rank = 0; rank < world_size; ++rank) arenas[rank].fill(calls[k], k, rank);
    }
    ranks.replay(graphs, arenas);
    checks.compare("replays of CUDA graphs", ranks, calls, arenas);
  }
  for (const cudaGraphExec_t graph : graphs) JAXKV_CHECK_CUDA(cudaGraphExecDestroy(graph));
}

bool check(int world_size, const Settings& settings) {
  Checks<GpuRanks> checks(world_size, settings);
  checks.thresholds();
  checks.random_orders(settings.brief ? 24 : 480);
  checks.wraps();
  replays(checks, world_size, settings);
  if (!settings.brief) checks.product_sizes();
  checks.absent();
  return checks.report();
}

int run(int argc, char** argv) {
  Settings settings{10'000'000'000,
                    100'000'000,
                    false,
                    {Algorithm::kLowLatency, Algorithm::kOneShot, Algorithm::kTwoShot}};
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--brief") settings.brief = true;
    if (std::string(argv[i]) == "--timeout-s" && i + 1 < argc) {
      settings.timeout_ns = std::strtoull(argv[i + 1], nullptr, 10) * 1'000'000'000;
      settings.short_timeout_ns = settings.timeout_ns / 20;
    }
  }
  bool right = true;
  for (const int world_size : {2, 4, 6, 8}) right &= check(world_size, settings);
  return right ? 0 : 1;
}

}  // namespace
}  // namespace jaxkv::collectives::cases

int main(int argc, char** argv) {
  alarm(600);
  // Streams that share a hardware queue would wait for each other.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  try {
    return jaxkv::collectives::cases::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
