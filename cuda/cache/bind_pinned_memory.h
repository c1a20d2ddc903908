#pragma once

#include <nanobind/nanobind.h>

namespace jaxkv::cache {

void bind_pinned_memory(nanobind::module_& m);

}  // namespace jaxkv::cache
