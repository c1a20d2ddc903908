"""Names of implementations by platform."""

IMPLEMENTATIONS = {"cpu": ("host", "xla"), "gpu": ("kernel", "dma", "pallas", "xla")}
