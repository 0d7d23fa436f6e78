"""Hosts as network namespaces, and programs on them."""
