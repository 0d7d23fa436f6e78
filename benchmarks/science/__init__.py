"""The quality and cost of the recipes, simulated on one small task: ``make science``."""
