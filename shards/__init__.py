"""The engine: one shard of one namespace, plain Python without Ray."""
