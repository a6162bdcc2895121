"""Stubs of the proto package `mindgrid.v1`, here so that `mindgrid` itself is not shadowed."""
