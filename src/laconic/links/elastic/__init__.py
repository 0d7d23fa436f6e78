"""Links whose workers come and go: views, the coordinator, and calls that are all or nothing."""
