"""Stubs of the episodic block."""
