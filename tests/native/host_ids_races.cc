// Registration of ids, for ThreadSanitizer: threads register lists and replace them, while all
// threads look lists up. The number of lists is large enough for long hash chains.
#include <algorithm>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include "transfer/host_ids.cc"

namespace jaxkv::transfer {
namespace {

constexpr int kThreads = 4, kLists = 6000, kIds = 2;
constexpr size_t kWords = kHostIdsHeader + kIds;

struct alignas(64) List {
  int32_t words[kWords];
};

bool opens(const List& list, size_t num_words = kWords) {
  return !host_ids_error(list.words, num_words);
}

void admit(List* list, int32_t id) {
  std::fill_n(list->words + kHostIdsHeader, kIds, id);
  write_host_ids_header(list->words);
  register_host_ids(list->words, kWords);
}

int wrong_answers(std::vector<List>* lists, const List& never_admitted, unsigned seed) {
  std::mt19937 random(seed);
  int wrong = 0;
  for (int i = 0; i < kLists; ++i) {
    admit(&(*lists)[i], i);
    List& earlier = (*lists)[random() % (i + 1)];
    wrong += !opens(earlier);
    wrong += opens(earlier, kWords - 1);
    wrong += opens(never_admitted);
    write_host_ids_header(earlier.words);  // now another list, which is not registered
    wrong += opens(earlier);
    admit(&earlier, -i);
    wrong += !opens(earlier);
  }
  for (const List& list : *lists) wrong += !opens(list);
  return wrong;
}

}  // namespace
}  // namespace jaxkv::transfer

int main() {
  using namespace jaxkv;
  using namespace jaxkv::transfer;
  List never_admitted{};
  write_host_ids_header(never_admitted.words);
  std::vector<std::vector<List>> lists(kThreads, std::vector<List>(kLists));
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] { wrong += wrong_answers(&lists[t], never_admitted, t); });
  }
  for (auto& thread : threads) thread.join();
  std::printf("%d answers wrong\n", wrong.load());
  return wrong ? 1 : 0;
}
