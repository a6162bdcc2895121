"""Generated from `mindd/episodic/v1/episodic.proto`."""
