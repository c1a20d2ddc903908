"""Tests; the folders are those of jaxkv/_src."""
