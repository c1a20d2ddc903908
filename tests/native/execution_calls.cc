// The wrappers of handlers for CUDA (cuda/execution.h), with a stub of XLA: the calls.
//
// Arguments: the wrapper (note, join, or both), whether the handler fails, and the execution: its
// device, "outside" for none, or "unknown" if XLA does not answer.
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "execution.h"

namespace {

bool fails = false, answers = true;
int device = 0;
int error_of_handler, error_of_xla;  // their addresses are the errors

XLA_FFI_Error* as_error(int& error) { return reinterpret_cast<XLA_FFI_Error*>(&error); }

XLA_FFI_Error* handler(XLA_FFI_CallFrame*) {
  std::puts("handler");
  return fails ? as_error(error_of_handler) : nullptr;
}
XLA_FFI_Error* get_stream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = reinterpret_cast<void*>(7);
  return answers ? nullptr : as_error(error_of_xla);
}
XLA_FFI_Error* get_device(XLA_FFI_DeviceOrdinal_Get_Args* args) {
  args->device_ordinal = device;
  return nullptr;
}
void destroy(XLA_FFI_Error_Destroy_Args* args) {
  std::puts(args->error == as_error(error_of_xla) ? "destroy" : "destroy the handler's error");
}

int number_of(const CUstream_st* stream) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(stream));
}

}  // namespace

namespace jaxkv {

void set_program_stream(int ordinal, CUstream_st* stream) {
  std::printf("stream %d of device %d\n", number_of(stream), ordinal);
}
void transfer::join_copies(int32_t ordinal, CUstream_st* stream) {
  std::printf("stream %d waits for device %d\n", number_of(stream), ordinal);
}

}  // namespace jaxkv

int main(int, char** arguments) {
  const std::string_view wrapper = arguments[1], execution = arguments[3];
  fails = std::atoi(arguments[2]);
  answers = execution != "unknown";
  device = std::atoi(arguments[3]);
  XLA_FFI_Api api{};
  api.XLA_FFI_Stream_Get = get_stream;
  api.XLA_FFI_DeviceOrdinal_Get = get_device;
  api.XLA_FFI_Error_Destroy = destroy;
  XLA_FFI_CallFrame frame{};
  frame.api = &api;
  frame.ctx = execution == "outside" ? nullptr : reinterpret_cast<XLA_FFI_ExecutionContext*>(&api);
  auto* wrapped = wrapper == "note"   ? jaxkv::note_stream<handler>
                  : wrapper == "join" ? jaxkv::join_on_failure<handler>
                                      : jaxkv::join_on_failure<jaxkv::note_stream<handler>>;
  const XLA_FFI_Error* error = wrapped(&frame);
  std::puts(error == as_error(error_of_handler) ? "error" : error ? "another error" : "success");
}
