"""What the recipes cost and gain in quality, simulated on one small task: ``make science``."""
