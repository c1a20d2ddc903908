// What all handlers for CUDA have in common, beside their own work.
#pragma once

#include <cstdint>
#include <optional>

#include "common/device.h"
#include "transfer/started_copies.h"
#include "xla/ffi/api/c_api.h"

namespace jaxkv {

struct Execution {
  CUstream_st* stream;
  int32_t device;
};

// Nothing outside of an execution: XLA also calls a handler for its version and traits.
inline std::optional<Execution> execution_of(const XLA_FFI_CallFrame& frame) {
  if (!frame.ctx) return std::nullopt;
  const XLA_FFI_Api& api = *frame.api;
  const auto succeeds = [&api](XLA_FFI_Error* error) {
    if (!error) return true;
    XLA_FFI_Error_Destroy_Args args{XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
    api.XLA_FFI_Error_Destroy(&args);
    return false;
  };
  XLA_FFI_Stream_Get_Args stream{XLA_FFI_Stream_Get_Args_STRUCT_SIZE, nullptr, frame.ctx, nullptr};
  XLA_FFI_DeviceOrdinal_Get_Args device{XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, nullptr,
                                        frame.ctx, -1};
  if (!succeeds(api.XLA_FFI_Stream_Get(&stream)) ||
      !succeeds(api.XLA_FFI_DeviceOrdinal_Get(&device)) || device.device_ordinal < 0 ||
      device.device_ordinal >= kMaxDevices) {
    return std::nullopt;
  }
  return Execution{static_cast<CUstream_st*>(stream.stream), device.device_ordinal};
}

// For the initialize stage: XLA passes the stream of the program, also if the execute stage is
// captured in a CUDA graph, on another stream.
template <XLA_FFI_Handler* kHandler>
XLA_FFI_Error* note_stream(XLA_FFI_CallFrame* frame) {
  if (const auto execution = execution_of(*frame)) {
    set_program_stream(execution->device, execution->stream);
  }
  return kHandler(frame);
}

// For the execute stage: XLA frees the arrays of a program that fails, from and to which
// asynchronous copies may be in flight.
template <XLA_FFI_Handler* kHandler>
XLA_FFI_Error* join_on_failure(XLA_FFI_CallFrame* frame) {
  XLA_FFI_Error* error = kHandler(frame);
  if (!error) return nullptr;
  if (const auto execution = execution_of(*frame)) {
    transfer::join_copies(execution->device, execution->stream);
  }
  return error;
}

}  // namespace jaxkv
