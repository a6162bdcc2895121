"""Generated from `mindd/semantic/v1/semantic.proto`."""
