"""Race training methods on emulated networks, and report the results."""
