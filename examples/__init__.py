"""Programs that use jaxkv. A package, so that no installed `examples` can take its name."""
