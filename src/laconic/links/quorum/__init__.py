"""Rounds that close with a quorum of workers: which workers take part in which round, and when."""
