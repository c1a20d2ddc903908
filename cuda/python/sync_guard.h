// Interception of the buffer protocol of a Python type, for jaxkv/_src/runtime/sync_guard.py.
#pragma once

#include <nanobind/nanobind.h>

// From 3.12 on, Python code can replace `__buffer__` itself.
#if PY_VERSION_HEX < 0x030C0000
#define JAXKV_WATCH_BUFFERS 1

namespace jaxkv::python {

// While `observe` is not None, a buffer request for an object of `type` is passed to observe(get,
// object), which must call get(object) or raise.
void watch_buffers(nanobind::type_object type, nanobind::object observe);

}  // namespace jaxkv::python
#endif
