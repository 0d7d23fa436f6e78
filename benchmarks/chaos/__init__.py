"""Faults on elastic runs over processes; see `benchmarks.chaos.__main__`."""
