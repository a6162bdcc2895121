"""Protobuf messages, their JSON, and how they turn into the engine's types."""
