"""The KV cache spec, host layouts, the host pool, and the device cache."""
