"""laconic's recipes and other libraries at equal wall clock on three networks: ``make race``."""
