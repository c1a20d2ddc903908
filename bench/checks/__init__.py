"""Tests on a GPU, recorded."""
