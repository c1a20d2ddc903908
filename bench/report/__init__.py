"""Tables and plots of the documentation, made of records."""
