"""Benchmarks of laconic's overhead, as ratios measured side by side: ``make bench``."""
