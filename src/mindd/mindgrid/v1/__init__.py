"""Generated from `mindd/mindgrid/v1/*.proto`."""
