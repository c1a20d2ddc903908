"""GPU test runs and their records."""
