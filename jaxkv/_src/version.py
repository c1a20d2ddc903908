"""The version of jaxkv, also read by the build (pyproject.toml)."""

__version__ = "0.1.0"
