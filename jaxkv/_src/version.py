"""The version: read by the build too (pyproject.toml)."""

__version__ = "0.1.0"
