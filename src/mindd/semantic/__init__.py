"""Stubs of the semantic block."""
