"""What workers exchange, when, and what it changes: pure mathematics, no processes."""
