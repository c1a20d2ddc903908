"""Implementation of jaxkv; nothing in here is public."""
