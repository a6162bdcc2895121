"""The episodic block's engine: one append-only log a namespace, its oracle and its files."""
