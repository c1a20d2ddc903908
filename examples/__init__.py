"""Programs that use jaxkv. A package, so that no installed `examples` shadows it."""
