"""Tests, by what they need: nothing, a folder, a killed process, or a Ray cluster."""
