"""CUDA driver queries through ctypes."""

import ctypes
from typing import Any


class Driver:
    """CUDA driver API; the named queries create no context and allocate nothing.

    Raises:
      OSError: there is no driver library.
      RuntimeError: a query failed; the text has the function and the CUDA error.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = library or ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)

    def call(self, function: str, *arguments: object) -> None:
        code = getattr(self._library, function)(*arguments)
        if code != 0:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(name))
            raise RuntimeError(f"{function}: {(name.value or b'unknown error').decode()} ({code})")

    def get(self, function: str, kind: type[ctypes._SimpleCData], *arguments: object) -> int:
        result = kind()
        self.call(function, ctypes.byref(result), *arguments)
        return result.value

    def _text(self, function: str, device: int) -> str:
        buffer = ctypes.create_string_buffer(256)
        self.call(function, buffer, len(buffer), device)
        return buffer.value.decode()

    def version(self) -> str:
        number = self.get("cuDriverGetVersion", ctypes.c_int)
        return f"{number // 1000}.{number % 1000 // 10}"

    def devices(self) -> list[int]:
        count = self.get("cuDeviceGetCount", ctypes.c_int)
        return [self.get("cuDeviceGet", ctypes.c_int, i) for i in range(count)]

    def name(self, device: int) -> str:
        return self._text("cuDeviceGetName", device)

    def pci_address(self, device: int) -> str:
        return self._text("cuDeviceGetPCIBusId", device).lower()

    def memory_bytes(self, device: int) -> int:
        return self.get("cuDeviceTotalMem_v2", ctypes.c_size_t, device)

    def attribute(self, device: int, attribute: int) -> int:
        return self.get("cuDeviceGetAttribute", ctypes.c_int, attribute, device)

    def can_access_peer(self, device: int, peer: int) -> bool:
        return bool(self.get("cuDeviceCanAccessPeer", ctypes.c_int, device, peer))
