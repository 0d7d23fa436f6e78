"""Rounds that close when some workers have arrived: who takes part in which round, and when."""
