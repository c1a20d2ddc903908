"""Tests, in the folder structure of jaxkv/_src."""
