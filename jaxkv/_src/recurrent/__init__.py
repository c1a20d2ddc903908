"""Recurrent states of hybrid models."""
