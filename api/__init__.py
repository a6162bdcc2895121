"""The door: HTTP and gRPC in front of the cluster."""
