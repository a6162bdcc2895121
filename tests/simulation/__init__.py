"""Random histories, judged by the oracle."""
