"""Implementation of jaxkv; private."""
