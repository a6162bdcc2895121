"""mindgrid: a memory service for agents that scales from a laptop to a Ray cluster."""

__version__ = "0.1.0"
