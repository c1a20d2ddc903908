"""Which block is where: keys, policies and the offload manager. Python only, without JAX."""
