"""Race laconic and other libraries at equal wall time on three networks: ``make race``."""
