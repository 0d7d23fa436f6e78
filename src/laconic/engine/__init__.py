"""Runs a recipe's rounds for one model and optimizer."""
