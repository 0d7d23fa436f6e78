"""Compare the cost model's predictions with measurements on emulated networks."""
