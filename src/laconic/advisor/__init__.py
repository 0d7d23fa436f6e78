"""Advice about which recipe to train with, and how to set it."""
