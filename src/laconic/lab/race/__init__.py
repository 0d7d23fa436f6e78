"""Races of training methods on emulated networks, and their report."""
