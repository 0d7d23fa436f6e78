"""Check the planner against published numbers, emulated networks, and its own limits."""
