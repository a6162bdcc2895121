"""The one configuration: a YAML file and `MINDD_…__…` variables in, checked specs out."""

from mindgrid.cluster.settings.load import load
from mindgrid.cluster.settings.model import Settings

__all__ = ["Settings", "load"]
