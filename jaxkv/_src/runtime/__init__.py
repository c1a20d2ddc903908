"""The native extension, errors, devices, shardings, and the host-sync guard."""
