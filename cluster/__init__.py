"""The cluster: placement, fan-out, hosts, coordinator, embedders, settings and the Ray handle."""
