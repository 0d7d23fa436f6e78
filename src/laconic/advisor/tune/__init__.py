"""`laconic tune`: a search for a recipe's settings."""
