"""The serving example, recorded."""
