"""The environment report."""
