"""Tuning tables: schema, JSON files, and lookup."""
