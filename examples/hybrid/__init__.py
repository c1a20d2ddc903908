"""A hybrid model with drafts, dispatched ahead of the host. Start with `run_ahead` in engine.py."""
