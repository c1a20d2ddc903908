#include "python/sync_guard.h"

#ifdef JAXKV_WATCH_BUFFERS

namespace nb = nanobind;

namespace jaxkv::python {
namespace {

getbufferproc g_get_buffer = nullptr;  // the original; also valid after watching ends
PyObject* g_observe = nullptr;         // owned; null while nothing is watched

int observed_get_buffer(PyObject* self, Py_buffer* view, int flags) {
  view->obj = nullptr;
  try {
    const auto observe = nb::borrow(g_observe);
    const auto get = nb::cpp_function([view, flags](nb::handle object) {
      if (g_get_buffer(object.ptr(), view, flags) != 0) throw nb::python_error();
    });
    observe(get, nb::handle(self));
    return 0;
  } catch (nb::python_error& error) {
    if (view->obj) PyBuffer_Release(view);
    error.restore();
    return -1;
  }
}

}  // namespace

void watch_buffers(nb::type_object type, nb::object observe) {
  PyBufferProcs* procs = reinterpret_cast<PyTypeObject*>(type.ptr())->tp_as_buffer;
  if (!procs || !procs->bf_getbuffer) throw nb::type_error("the type has no buffer protocol");
  if (procs->bf_getbuffer != observed_get_buffer) g_get_buffer = procs->bf_getbuffer;
  Py_XDECREF(g_observe);
  g_observe = observe.is_none() ? nullptr : observe.release().ptr();
  procs->bf_getbuffer = g_observe ? observed_get_buffer : g_get_buffer;
}

}  // namespace jaxkv::python
#endif
