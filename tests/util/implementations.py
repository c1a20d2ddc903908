"""Names of implementations by platform."""

IMPLEMENTATIONS = {"cpu": ("host",), "gpu": ("kernel", "dma", "pallas")}
