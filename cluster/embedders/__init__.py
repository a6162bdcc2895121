"""Embedding models behind one protocol: a provider is one file in this folder."""
