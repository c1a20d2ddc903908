"""Host tiers of two serving engines written in JAX, on jaxkv."""
