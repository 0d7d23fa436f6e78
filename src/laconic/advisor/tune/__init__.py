"""`laconic tune`: search for good settings of a recipe."""
