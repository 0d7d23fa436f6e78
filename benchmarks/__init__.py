"""What laconic costs, as ratios measured side by side: ``make bench``."""
