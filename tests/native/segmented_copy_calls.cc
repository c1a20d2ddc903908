// The handlers of asynchronous copies by the copy engine, with a runtime stub that records the
// calls and copies on the host when a copy is enqueued.
//
// Arguments: the number of the call that fails, from 1 (0: none), then what is called:
//   start RUN AHEAD     a load of 6 segments of an execution, of which waits enqueue the rest
//   store RUN AHEAD     the same for a store
//   joined RUN AHEAD    a load that XLA's stream waits for
//   whole RUN           a load that is enqueued entirely at its start
//   wait RUN SEGMENT    the handler of a wait, of a segment known on the device if negative
//   begin RUN           what XLA calls before the first start of an execution
//   free                frees the arrays of the last copy
//   aside               runs the next step in another thread
// The lists of ids are freed after each start, and copies are joined after a step that fails.
// Prints each step, the calls below it, and in the end the number of copies started, by copy
// stream, and the runtime's last error.
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "common/device.h"
#include "common/error_ring.cc"
#include "ffi_operands.h"
#include "stream_calls.h"
#include "transfer/async_copy.h"
#include "transfer/block_copy.cc"
#include "transfer/copy_engine.cu"
#include "transfer/host_ids.cc"
#include "transfer/started_copies.h"

extern "C" XLA_FFI_Error* WaitCopyDma(XLA_FFI_CallFrame*);

namespace {

constexpr size_t kSegments = 6, kBlocks = 4, kBlockBytes = 8;
constexpr const char* kStreams[] = {"xla", "kernel load", "load", "kernel store", "store"};

const char* name_of(cudaStream_t stream) { return kStreams[number_of(stream)]; }

// The first event of a copy stream is for work of XLA, the others are for ends of copies.
const char* name_of(cudaEvent_t event) { return (number_of(event) - 1) % 65 ? "end" : "start"; }

const char* name_of_launch(dim3 block) {
  return block.x > 32 ? "waits in a kernel" : "gets the ticket";
}

// An array of each segment on either side; both have 4 blocks of 8 bytes.
struct Segments {
  std::vector<std::vector<uint8_t>> strided, dense;
};
std::vector<Segments> all_arrays;

// "copy.segment" of an address of device memory.
std::string segment_at(const void* address) {
  for (size_t c = 0; c < all_arrays.size(); ++c) {
    for (size_t s = 0; s < all_arrays[c].dense.size(); ++s) {
      const auto* begin = all_arrays[c].dense[s].data();
      if (address >= begin && address < begin + kBlocks * kBlockBytes) {
        return std::to_string(c) + "." + std::to_string(s);
      }
    }
  }
  return "unknown";
}

CUresult write_value(CUstream stream, CUdeviceptr, cuuint32_t value, unsigned int) {
  const cudaError_t status = call("%s signals %u", name_of(stream), value);
  last_error = cudaSuccess;  // of the runtime only
  return static_cast<CUresult>(status);
}

}  // namespace

extern "C" {
cudaError_t cudaMalloc(void** memory, size_t bytes) {
  return *memory = std::calloc(1, bytes), cudaSuccess;
}
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t) {
  return cudaErrorUnknown;  // each segment is a batch
}
cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const size_t* bytes,
                                 size_t count, cudaMemcpyAttributes*, size_t*, size_t,
                                 cudaStream_t stream) {
  const bool loads = segment_at(to[0]) != "unknown";
  const auto status =
      call("%s copies %s", name_of(stream), segment_at(loads ? to[0] : from[0]).c_str());
  for (size_t i = 0; i < count && status == cudaSuccess; ++i) std::memcpy(to[i], from[i], bytes[i]);
  return status;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned int,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *found = reinterpret_cast<void*>(write_value);
  *result = std::strcmp(name, "cuStreamWriteValue32") ? cudaDriverEntryPointSymbolNotFound
                                                      : cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
}

// What a wait asks XLA for; an execution is the context itself, and an error its message.
namespace {
XLA_FFI_Error* get_stream(XLA_FFI_Stream_Get_Args* args) { return args->stream = nullptr, nullptr; }
XLA_FFI_Error* get_device(XLA_FFI_DeviceOrdinal_Get_Args* args) {
  return args->device_ordinal = 0, nullptr;
}
XLA_FFI_Error* get_run(XLA_FFI_RunId_Get_Args* args) {
  return args->run_id = reinterpret_cast<int64_t>(args->ctx), nullptr;
}
XLA_FFI_Error* create_error(XLA_FFI_Error_Create_Args* args) {
  return reinterpret_cast<XLA_FFI_Error*>(new std::string(args->message));
}
}  // namespace

namespace jaxkv {

void add_own_stream(int, CUstream_st*) {}
ErrorRings* device_rings(int32_t, Scope) { return nullptr; }
ffi::Error prepare_rings(int32_t, Scope) { return ffi::Error::Success(); }

namespace transfer {

ffi::Error prepare_copy_kernel(int32_t) { return ffi::Error::Success(); }

namespace {

ffi::Error start(int64_t run, int64_t ahead, bool to_dense, bool joined, bool deferred) {
  Segments& segments = all_arrays.emplace_back();
  const auto number = static_cast<uint8_t>(all_arrays.size());
  Arrays arrays;
  for (const bool strided : {true, false}) {
    auto& side = strided ? segments.strided : segments.dense;
    const bool source = strided == to_dense;
    for (size_t s = 0; s < kSegments; ++s) {
      auto& array = side.emplace_back(kBlocks * kBlockBytes, source ? 16 * number + s : 0);
      arrays.add(array.data(), array.size(), !source);
    }
  }
  Ids sources(std::vector{0, 2}), destinations(std::vector{1, 3});
  std::vector<int32_t> words(2 * (1 + kSegments));
  Operand ticket(XLA_FFI_DataType_S32, words.data(), words.size());
  const int64_t bytes = kBlockBytes;
  // As encoded by block_copy.py: one run in each block.
  std::vector<int64_t> attribute = {
      0,     to_dense, 1, kHostIdsHeader, kHostIdsHeader, 2,     kSegments, bytes,  bytes,
      bytes, 1,        1, bytes,          bytes,          bytes, kBlocks,   kBlocks};
  attribute.resize(attribute.size() + 2 * kSegments);
  const XLA_FFI_Args all_args = arrays.args();
  const XLA_FFI_Rets all_rets = arrays.rets();
  const ffi::Buffer<ffi::S32> ids[] = {ffi::Buffer<ffi::S32>(&sources.operand.buffer),
                                       ffi::Buffer<ffi::S32>(&destinations.operand.buffer),
                                       ffi::Buffer<ffi::S32>(&ticket.buffer)};
  return start_by_dma(nullptr, 0, {run}, ids[0], ids[1], ffi::RemainingArgs(&all_args, 0), ids[2],
                      ffi::RemainingRets(&all_rets, 0),
                      CopyAttribute(attribute.data(), attribute.size()), 1, joined, ahead,
                      deferred);
}

ffi::Error wait_for(int64_t run, int64_t segment) {
  int64_t zero = 0, last = kSegments - 1;
  bool traced = false;
  XLA_FFI_Scalar number{XLA_FFI_DataType_S64, &zero}, of_segment{XLA_FFI_DataType_S64, &segment},
      of_last{XLA_FFI_DataType_S64, &last}, flag{XLA_FFI_DataType_PRED, &traced};
  XLA_FFI_Array places{XLA_FFI_DataType_S64, 0, &zero};
  const char* keys[] = {"first_array", "has_traced_segment", "last", "places",
                        "segment",     "timeout_ns"};
  std::vector<XLA_FFI_ByteSpan> spans;
  for (const char* key : keys) spans.push_back({key, std::strlen(key)});
  std::vector<XLA_FFI_ByteSpan*> names;
  for (auto& span : spans) names.push_back(&span);
  void* values[] = {&number, &flag, &of_last, &places, &of_segment, &number};
  std::vector<XLA_FFI_AttrType> types(6, XLA_FFI_AttrType_SCALAR);
  types[3] = XLA_FFI_AttrType_ARRAY;
  std::vector<int32_t> words(2 * (1 + kSegments));
  Operand ticket(XLA_FFI_DataType_S32, words.data(), words.size());
  void* args[] = {&ticket.buffer};
  XLA_FFI_ArgType arg_types[] = {XLA_FFI_ArgType_BUFFER};
  XLA_FFI_Api api{};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.XLA_FFI_Stream_Get = get_stream;
  api.XLA_FFI_DeviceOrdinal_Get = get_device;
  api.XLA_FFI_RunId_Get = get_run;
  api.XLA_FFI_Error_Create = create_error;
  XLA_FFI_CallFrame frame{
      XLA_FFI_CallFrame_STRUCT_SIZE,
      nullptr,
      &api,
      reinterpret_cast<XLA_FFI_ExecutionContext*>(run),
      XLA_FFI_ExecutionStage_EXECUTE,
      {XLA_FFI_Args_STRUCT_SIZE, nullptr, 1, arg_types, args},
      {XLA_FFI_Rets_STRUCT_SIZE, nullptr, 0, nullptr, nullptr},
      {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, 6, types.data(), names.data(), values},
      nullptr};
  const std::unique_ptr<std::string> error(reinterpret_cast<std::string*>(WaitCopyDma(&frame)));
  return error ? ffi::Error::Internal(*error) : ffi::Error::Success();
}

ffi::Error step(std::string_view name, int64_t run, int64_t number) {
  if (name == "wait") return wait_for(run, number);
  if (name == "whole") return start(run, 1, true, false, false);
  if (name == "begin") return forget_copies(0, run), ffi::Error::Success();
  return start(run, number, name != "store", name == "joined", true);
}

// Whether the blocks of a segment have arrived, and nothing else.
bool is_copied(const Segments& arrays, size_t segment) {
  const auto &a = arrays.strided[segment], &b = arrays.dense[segment];
  const auto& source = a[0] ? a : b;
  const auto& written = a[0] ? b : a;
  for (size_t i = 0; i < written.size(); ++i) {
    if (written[i] != (i / kBlockBytes % 2 ? source[0] : 0)) return false;
  }
  return true;
}

int run(int count, char** arguments) {
  if (prepare_copy_streams(0).failure()) return 1;
  failing = std::atoi(arguments[1]);
  all_arrays.reserve(256);
  recorded = true;
  indent = "  ";
  bool aside = false;
  for (int i = 2; i < count;) {
    const std::string_view name = arguments[i++];
    if (name == "aside") {
      aside = true;
      continue;
    }
    std::printf("%s\n", arguments[i - 1]);
    if (name == "free") {
      all_arrays.back() = {};
      continue;
    }
    const int64_t execution = std::atoll(arguments[i++]);
    const bool has_number = name != "whole" && name != "begin";
    const int64_t number = has_number ? std::atoll(arguments[i++]) : 0;
    auto error = ffi::Error::Success();
    auto work = [&] {
      error = step(name, execution, number);
      if (error.failure()) join_copies(0, nullptr);  // as execution.h does
    };
    if (std::exchange(aside, false)) {
      std::thread(work).join();
    } else {
      work();
    }
    if (error.failure()) std::printf("  error %s\n", error.message().c_str());
  }
  for (const Segments& arrays : all_arrays) {
    std::printf("copied ");
    for (size_t s = 0; s < arrays.dense.size(); ++s) std::printf("%d", is_copied(arrays, s));
    std::printf("\n");
  }
  const auto started = started_copies();
  std::printf("started %d %d, error %d\n", static_cast<int>(started[1]),
              static_cast<int>(started[3]), last_error);
  return 0;
}

}  // namespace
}  // namespace transfer
}  // namespace jaxkv

int main(int count, char** arguments) { return jaxkv::transfer::run(count, arguments); }
