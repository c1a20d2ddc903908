// Operands as XLA passes them to a handler.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "transfer/host_ids.h"
#include "xla/ffi/api/ffi.h"

namespace jaxkv::transfer {

struct Operand {
  int64_t length;
  XLA_FFI_Buffer buffer;

  Operand(XLA_FFI_DataType dtype, void* data, size_t size)
      : length(static_cast<int64_t>(size)),
        buffer{XLA_FFI_Buffer_STRUCT_SIZE, nullptr, dtype, data, 1, &length} {}
  Operand(const Operand&) = delete;
};

// HostIds as created from NumPy.
struct Ids {
  std::vector<int32_t> words;
  Operand operand;

  template <class Numbers>
  explicit Ids(const Numbers& ids)
      : words(words_of(ids)), operand(XLA_FFI_DataType_S32, words.data(), words.size()) {
    register_host_ids(words.data(), words.size());
  }

 private:
  template <class Numbers>
  static std::vector<int32_t> words_of(const Numbers& ids) {
    std::vector<int32_t> words(kHostIdsHeader);
    words.insert(words.end(), ids.begin(), ids.end());
    write_host_ids_header(words);
    return words;
  }
};

// The arrays of a copy: all are arguments, and those that it writes are results, too.
class Arrays {
 public:
  void add(uint8_t* data, size_t size, bool written) {
    operands_.push_back(std::make_unique<Operand>(XLA_FFI_DataType_U8, data, size));
    args_.push_back(&operands_.back()->buffer);
    if (written) rets_.push_back(&operands_.back()->buffer);
  }

  // As long as this object exists, and nothing is added.
  XLA_FFI_Args args() {
    arg_types_.assign(args_.size(), XLA_FFI_ArgType_BUFFER);
    return {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(args_.size()),
            arg_types_.data(), args_.data()};
  }
  XLA_FFI_Rets rets() {
    ret_types_.assign(rets_.size(), XLA_FFI_RetType_BUFFER);
    return {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(rets_.size()),
            ret_types_.data(), rets_.data()};
  }

 private:
  std::vector<std::unique_ptr<Operand>> operands_;
  std::vector<void*> args_, rets_;
  std::vector<XLA_FFI_ArgType> arg_types_;
  std::vector<XLA_FFI_RetType> ret_types_;
};

}  // namespace jaxkv::transfer
