"""Check a host and the network between hosts."""
