"""What a newcomer costs the other workers of an elastic run."""
