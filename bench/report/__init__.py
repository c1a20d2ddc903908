"""Tables and plots of the documentation, generated from records."""
