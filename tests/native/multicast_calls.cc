// Multicast memory with a driver stub that records the calls.
//
// Prints one line per call. The argument is the number of the call that fails, from 1; then the
// last line is the exception.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "collectives/multicast.cu"

namespace {

int calls = 0, failing = 0;
unsigned long long last_handle = 0;
CUdevice device_of[16];  // by handle of the memory

CUresult call(const char* name, long long of) {
  std::printf("%s %lld\n", name, of);
  return ++calls == failing ? CUDA_ERROR_NOT_PERMITTED : CUDA_SUCCESS;
}

// Handles are numbered in order of creation; addresses are 1000 times that.
template <class Number>
CUresult make(const char* name, Number* number, Number unit) {
  const CUresult status = call(name, static_cast<long long>((last_handle + 1) * unit));
  if (status == CUDA_SUCCESS) *number = ++last_handle * unit;
  return status;
}

CUresult get_error_name(CUresult, const char** name) {
  *name = "CUDA_ERROR_NOT_PERMITTED";
  return CUDA_SUCCESS;
}
CUresult device_get(CUdevice* device, int ordinal) {
  *device = ordinal + 100;
  return CUDA_SUCCESS;
}
CUresult device_attribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED && device == 103;
  return call("attribute", device);
}
CUresult granularity_of_memory(size_t* bytes, const CUmemAllocationProp*,
                               CUmemAllocationGranularity_flags) {
  *bytes = 4096;
  return CUDA_SUCCESS;
}
CUresult granularity_of_multicast(size_t* bytes, const CUmulticastObjectProp*,
                                  CUmulticastGranularity_flags) {
  *bytes = 1024;
  return CUDA_SUCCESS;
}
CUresult create_multicast(CUmemGenericAllocationHandle* handle, const CUmulticastObjectProp* what) {
  if (what->size != 8192 || what->numDevices != 2) return CUDA_ERROR_INVALID_VALUE;
  return make("create-multicast", handle, 1ull);
}
CUresult add_device(CUmemGenericAllocationHandle, CUdevice device) { return call("add", device); }
CUresult create(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* what,
                unsigned long long) {
  if (bytes != 8192 || what->location.id < 100) return CUDA_ERROR_INVALID_VALUE;
  const CUresult status = make("create", handle, 1ull);
  if (status == CUDA_SUCCESS) device_of[*handle] = what->location.id;
  return status;
}
CUresult release(CUmemGenericAllocationHandle handle) { return call("release", handle); }
CUresult bind(CUmemGenericAllocationHandle, size_t, CUmemGenericAllocationHandle memory, size_t,
              size_t, unsigned long long) {
  return call("bind", device_of[memory]);
}
CUresult unbind(CUmemGenericAllocationHandle, CUdevice device, size_t, size_t) {
  return call("unbind", device);
}
CUresult reserve(CUdeviceptr* at, size_t, size_t, CUdeviceptr, unsigned long long) {
  return make("reserve", at, 1000ull);
}
CUresult free_address(CUdeviceptr at, size_t) { return call("free", at); }
CUresult map(CUdeviceptr at, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) {
  return call("map", at);
}
CUresult unmap(CUdeviceptr at, size_t) { return call("unmap", at); }
CUresult set_access(CUdeviceptr at, size_t, const CUmemAccessDesc*, size_t) {
  return call("access", at);
}

}  // namespace

extern "C" cudaError_t cudaGetLastError() { return cudaSuccess; }

extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found,
                                                        unsigned int, unsigned long long,
                                                        cudaDriverEntryPointQueryResult* result) {
  const std::pair<const char*, void*> known[] = {
      {"cuGetErrorName", reinterpret_cast<void*>(get_error_name)},
      {"cuDeviceGet", reinterpret_cast<void*>(device_get)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(device_attribute)},
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(granularity_of_memory)},
      {"cuMulticastGetGranularity", reinterpret_cast<void*>(granularity_of_multicast)},
      {"cuMulticastCreate", reinterpret_cast<void*>(create_multicast)},
      {"cuMulticastAddDevice", reinterpret_cast<void*>(add_device)},
      {"cuMulticastBindMem", reinterpret_cast<void*>(bind)},
      {"cuMulticastUnbind", reinterpret_cast<void*>(unbind)},
      {"cuMemCreate", reinterpret_cast<void*>(create)},
      {"cuMemRelease", reinterpret_cast<void*>(release)},
      {"cuMemAddressReserve", reinterpret_cast<void*>(reserve)},
      {"cuMemAddressFree", reinterpret_cast<void*>(free_address)},
      {"cuMemMap", reinterpret_cast<void*>(map)},
      {"cuMemUnmap", reinterpret_cast<void*>(unmap)},
      {"cuMemSetAccess", reinterpret_cast<void*>(set_access)},
  };
  for (const auto& [its_name, function] : known) {
    if (std::strcmp(name, its_name) == 0) *found = function;
  }
  *result = *found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

int main(int argc, char** argv) {
  if (jaxkv::collectives::multicast_supported(2) || !jaxkv::collectives::multicast_supported(3))
    return 1;
  calls = 0;
  failing = argc > 1 ? std::atoi(argv[1]) : 0;
  try {
    const jaxkv::collectives::MulticastMemory memory({3, 2}, 4097);
    std::printf("have %zu %zu\n", reinterpret_cast<uintptr_t>(memory.local_address(1)),
                memory.multicast_address(1).address);
  } catch (const std::runtime_error& error) {
    std::printf("%s\n", error.what());
  }
}
