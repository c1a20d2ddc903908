// Multicast memory by the CUDA driver API. Each step registers its own cleanup.
#include <cudaTypedefs.h>

#include <string>

#include "collectives/multicast.h"
#include "common/cuda_check.h"
#include "common/driver.h"

namespace jaxkv::collectives {
namespace {

#define JAXKV_DRIVER(name, version) \
  const PFN_##name##_##version name = require_driver_function<PFN_##name##_##version>(#name);

std::string multicast_on(int32_t device) {
  return "multicast memory of device " + std::to_string(device);
}

CUdevice driver_device(int32_t device) {
  JAXKV_DRIVER(cuDeviceGet, v2000)
  CUdevice found = 0;
  JAXKV_CHECK_CUDA(cuDeviceGet(&found, device), multicast_on(device));
  return found;
}

// Creates multicast memory; every step that allocates registers its cleanup.
struct Builder {
  JAXKV_DRIVER(cuMemCreate, v10020)
  JAXKV_DRIVER(cuMemRelease, v10020)
  JAXKV_DRIVER(cuMemAddressReserve, v10020)
  JAXKV_DRIVER(cuMemAddressFree, v10020)
  JAXKV_DRIVER(cuMemMap, v10020)
  JAXKV_DRIVER(cuMemUnmap, v10020)
  JAXKV_DRIVER(cuMemSetAccess, v10020)
  JAXKV_DRIVER(cuMemGetAllocationGranularity, v10020)
  JAXKV_DRIVER(cuMulticastCreate, v12010)
  JAXKV_DRIVER(cuMulticastAddDevice, v12010)
  JAXKV_DRIVER(cuMulticastBindMem, v12010)
  JAXKV_DRIVER(cuMulticastUnbind, v12010)
  JAXKV_DRIVER(cuMulticastGetGranularity, v12010)
  Undo& undo;
  size_t bytes;

  CUmemGenericAllocationHandle create_multicast(const std::vector<int32_t>& devices) {
    CUmulticastObjectProp properties{};
    properties.numDevices = static_cast<unsigned int>(devices.size());
    properties.size = bytes;
    size_t granularity = 0;
    // Not the recommended granularity, which can be many times the size of a workspace.
    JAXKV_CHECK_CUDA(
        cuMulticastGetGranularity(&granularity, &properties, CU_MULTICAST_GRANULARITY_MINIMUM),
        multicast_on(devices[0]));
    round_up_to(granularity);
    for (const int32_t device : devices) {
      const auto memory = memory_on(device);
      JAXKV_CHECK_CUDA(
          cuMemGetAllocationGranularity(&granularity, &memory, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
          multicast_on(device));
      round_up_to(granularity);
    }
    properties.size = bytes;
    CUmemGenericAllocationHandle multicast = 0;
    JAXKV_CHECK_CUDA(cuMulticastCreate(&multicast, &properties), multicast_on(devices[0]));
    undo.push([multicast, release = cuMemRelease] { (void)release(multicast); });
    // All devices must be added before memory of any is bound.
    for (const int32_t device : devices) {
      JAXKV_CHECK_CUDA(cuMulticastAddDevice(multicast, driver_device(device)),
                       multicast_on(device));
    }
    return multicast;
  }

  CUmemGenericAllocationHandle bind_memory(CUmemGenericAllocationHandle multicast, int32_t device) {
    const auto properties = memory_on(device);
    CUmemGenericAllocationHandle memory = 0;
    JAXKV_CHECK_CUDA(cuMemCreate(&memory, bytes, &properties, 0), multicast_on(device));
    undo.push([memory, release = cuMemRelease] { (void)release(memory); });
    JAXKV_CHECK_CUDA(cuMulticastBindMem(multicast, 0, memory, 0, bytes, 0), multicast_on(device));
    undo.push([multicast, on = driver_device(device), size = bytes, unbind = cuMulticastUnbind] {
      (void)unbind(multicast, on, 0, size);
    });
    return memory;
  }

  // Maps memory or a multicast object into the address space, accessible by `device` only.
  CUdeviceptr map(int32_t device, CUmemGenericAllocationHandle handle) {
    CUdeviceptr at = 0;
    JAXKV_CHECK_CUDA(cuMemAddressReserve(&at, bytes, 0, 0, 0), multicast_on(device));
    undo.push([at, size = bytes, free = cuMemAddressFree] { (void)free(at, size); });
    JAXKV_CHECK_CUDA(cuMemMap(at, bytes, 0, handle, 0), multicast_on(device));
    undo.push([at, size = bytes, unmap = cuMemUnmap] { (void)unmap(at, size); });
    CUmemAccessDesc access{};
    access.location = memory_on(device).location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    JAXKV_CHECK_CUDA(cuMemSetAccess(at, bytes, &access, 1), multicast_on(device));
    return at;
  }

  static CUmemAllocationProp memory_on(int32_t device) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = driver_device(device);
    return properties;
  }

  void round_up_to(size_t granularity) {
    bytes = (bytes + granularity - 1) / granularity * granularity;
  }
};

}  // namespace

MulticastMemory::MulticastMemory(const std::vector<int32_t>& devices, size_t bytes) {
  Builder builder{.undo = undo_, .bytes = bytes};
  const auto multicast = builder.create_multicast(devices);
  for (const int32_t device : devices) {
    const auto memory = builder.bind_memory(multicast, device);
    own_.push_back(reinterpret_cast<void*>(builder.map(device, memory)));
  }
  // After all memory is bound, so that the multicast mapping is complete.
  for (const int32_t device : devices) all_.push_back({builder.map(device, multicast)});
}

bool multicast_supported(int32_t device) {
  JAXKV_DRIVER(cuDeviceGetAttribute, v2000)
  int supported = 0;
  JAXKV_CHECK_CUDA(cuDeviceGetAttribute(&supported, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED,
                                        driver_device(device)),
                   multicast_on(device));
  return supported != 0;
}

}  // namespace jaxkv::collectives
