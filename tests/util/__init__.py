"""Helpers that test files share."""
