"""A small continuous-batching engine over jaxkv. Start with `Engine.step` in engine.py."""
