// Counts the CUDA driver and runtime calls of each thread, by CUPTI callbacks.
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>

// The declarations needed from cupti_callbacks.h, which is not installed with every libcupti.
extern "C" {
struct CallbackData {
  int32_t site;  // 0: entry
  const char* function;
};
using Callback = void (*)(void*, int32_t domain, uint32_t id, const CallbackData*);
int32_t cuptiSubscribe(void** subscriber, Callback, void* userdata);
int32_t cuptiEnableDomain(uint32_t enable, void* subscriber, int32_t domain);
int32_t cuptiUnsubscribe(void* subscriber);
}

namespace {

constexpr int32_t kDriverApi = 1, kRuntimeApi = 2;

std::mutex g_mutex;
std::map<std::string, int> g_calls[2];  // [0] other threads, [1] the thread that started the count
std::thread::id g_thread;
void* g_subscriber;
std::string g_report;

void count(void*, int32_t, uint32_t, const CallbackData* call) {
  if (call->site != 0) return;
  std::lock_guard lock(g_mutex);
  ++g_calls[std::this_thread::get_id() == g_thread][call->function];
}

}  // namespace

// Returns 0 or the CUPTI error.
extern "C" int32_t start_counting() {
  for (auto& calls : g_calls) calls.clear();
  g_thread = std::this_thread::get_id();
  if (int32_t error = cuptiSubscribe(&g_subscriber, count, nullptr)) return error;
  if (int32_t error = cuptiEnableDomain(1, g_subscriber, kDriverApi)) return error;
  return cuptiEnableDomain(1, g_subscriber, kRuntimeApi);
}

extern "C" int32_t stop_counting() { return cuptiUnsubscribe(g_subscriber); }

// Lines of "function count", valid until the next call.
extern "C" const char* counted(bool by_this_thread) {
  std::lock_guard lock(g_mutex);
  g_report.clear();
  for (const auto& [function, calls] : g_calls[by_this_thread]) {
    g_report += function + " " + std::to_string(calls) + "\n";
  }
  return g_report.c_str();
}
