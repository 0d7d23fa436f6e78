"""Emulate hosts as network namespaces and run programs on them."""
