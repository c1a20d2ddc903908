"""A hybrid model with speculative decoding and asynchronous scheduling; see engine.run_async."""
