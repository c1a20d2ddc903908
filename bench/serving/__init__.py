"""Records of the serving example."""
