"""Batch work on a running store: the command line and, later, ingest, re-embed and re-index."""
