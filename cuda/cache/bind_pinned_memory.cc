// Python functions for pinned host memory: DLPack tensors for JAX, and views for NumPy.
#include "cache/bind_pinned_memory.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "cache/pinned_memory.h"

namespace nb = nanobind;

namespace jaxkv::cache {
namespace {

// The C interface of DLPack, version 0.8.
struct DLDevice {
  int32_t type, id;
};
struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};
struct DLManagedTensor {
  DLTensor tensor;
  void* context;
  void (*deleter)(DLManagedTensor*);
};
constexpr const char* kUnused = "dltensor";  // the name of a capsule that nobody has consumed
constexpr int32_t kCpu = 1, kCudaHost = 3;

struct Tensor {
  Tensor(std::vector<int64_t> sizes, std::shared_ptr<PinnedMemory> of)
      : shape(std::move(sizes)), memory(std::move(of)) {
    ++memory->num_arrays;
  }
  ~Tensor() { --memory->num_arrays; }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  DLManagedTensor managed{};
  std::vector<int64_t> shape;
  std::shared_ptr<PinnedMemory> memory;
};

// XLA calls it in any of its threads: without Python.
void delete_tensor(DLManagedTensor* managed) { delete static_cast<Tensor*>(managed->context); }

void delete_unused(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, kUnused)) {
    delete_tensor(static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, kUnused)));
  }
}

nb::object pinned_tensor(const PinnedMemory& found, std::vector<int64_t> shape, uint8_t code,
                         uint8_t bits, int device) {
  // As an argument, a shared pointer would own the Python object: freed in a thread of XLA, it
  // would wait for the interpreter, which may have ended.
  auto memory = PinnedMemory::find(found.data());
  size_t num_bytes = bits / 8;
  for (const int64_t size : shape) num_bytes *= static_cast<size_t>(size);
  if (num_bytes > memory->num_bytes()) throw nb::value_error("the tensor exceeds its memory");
  auto tensor = std::make_unique<Tensor>(std::move(shape), std::move(memory));
  tensor->managed = {
      .tensor = {.data = tensor->memory->data(),
                 .device = {device < 0 ? kCpu : kCudaHost, std::max(device, 0)},
                 .ndim = static_cast<int32_t>(tensor->shape.size()),
                 .dtype = {code, bits, 1},
                 .shape = tensor->shape.data(),
                 .strides = nullptr,  // row-major
                 .byte_offset = 0},
      .context = tensor.get(),
      .deleter = delete_tensor,
  };
  PyObject* const capsule = PyCapsule_New(&tensor->managed, kUnused, delete_unused);
  if (!capsule) nb::raise_python_error();
  (void)tensor.release();
  return nb::steal(capsule);
}

using Bytes = nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>, nb::c_contig>;

nb::object view_of(const std::shared_ptr<PinnedMemory>& memory) {
  if (!memory) return nb::none();
  auto owner = std::make_unique<std::shared_ptr<PinnedMemory>>(memory);
  const nb::capsule held(
      owner.get(), [](void* p) noexcept { delete static_cast<std::shared_ptr<PinnedMemory>*>(p); });
  (void)owner.release();
  return nb::cast(Bytes(memory->data(), {memory->num_bytes()}, held));
}

// Does not own the memory. An address alone may become that of other memory. A capsule: nanobind
// reports instances of its classes that live until the process ends as leaked.
using PinnedRef = std::weak_ptr<PinnedMemory>;

nb::capsule pinned_ref(uintptr_t address) {
  auto ref =
      std::make_unique<PinnedRef>(PinnedMemory::find(reinterpret_cast<const void*>(address)));
  nb::capsule capsule(ref.get(), [](void* p) noexcept { delete static_cast<PinnedRef*>(p); });
  (void)ref.release();
  return capsule;
}

nb::object view_of_ref(const nb::capsule& ref) {
  return view_of(static_cast<PinnedRef*>(ref.data())->lock());
}

int num_arrays(const nb::capsule& ref) {
  const auto memory = static_cast<PinnedRef*>(ref.data())->lock();
  return memory ? memory->num_arrays.load() : 0;
}

nb::object pinned_view(uintptr_t address) {
  return view_of(PinnedMemory::find(reinterpret_cast<const void*>(address)));
}

}  // namespace

void bind_pinned_memory(nb::module_& m) {
  const nb::call_guard<nb::gil_scoped_release> without_gil;
  nb::class_<PinnedMemory>(
      m, "PinnedMemory",
      "Host memory on a NUMA node (-1: any), page-locked for CUDA devices (none: not page-locked): "
      "zeroed, or that of a file of shared memory, after its header (-1: zeroed), which may have "
      "its pages already. `progress` is called with the number of bytes populated.")
      .def(nb::new_(&PinnedMemory::create), nb::arg("num_bytes"), nb::arg("node"),
           nb::arg("devices"), nb::arg("fd") = -1, nb::arg("allocated") = false,
           nb::arg("progress").none() = nb::none(), without_gil)
      .def("tensor", &pinned_tensor, nb::arg("shape"), nb::arg("code"), nb::arg("bits"),
           nb::arg("device"),
           "A DLPack capsule of the memory, for a CUDA device or the CPU (-1); the consumer owns "
           "the memory too.");
  m.attr("FILE_OFFSET") = kFileOffset;
  m.def("pinned_view", &pinned_view, nb::arg("address"),
        "The bytes of the pinned tensor that begins at an address, read-only, without a copy; "
        "None if there is no such tensor. The view owns the memory too.");
  m.def("pinned_ref", &pinned_ref, nb::arg("address"),
        "Refers to the pinned memory that begins at an address, without owning it.");
  m.def("pinned_ref_view", &view_of_ref, nb::arg("ref"),
        "`pinned_view` of what a `pinned_ref` refers to; None once the memory is free.");
  m.def("num_pinned_arrays", &num_arrays, nb::arg("ref"),
        "The number of JAX's arrays in the pinned memory that a `pinned_ref` refers to.");
  m.def("nodes_of_pages", &nodes_of_pages, nb::arg("address"), nb::arg("num_bytes"), without_gil,
        "The NUMA node of each page of a sample, or a negative errno.");
  m.def("wait_for_frees", &wait_for_frees, without_gil,
        "Waits until all pinned memory without an owner is free.");
  m.def("stop_freeing", &stop_freeing, without_gil,
        "Leaves all pinned memory to the end of the process.");
}

}  // namespace jaxkv::cache
