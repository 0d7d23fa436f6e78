"""What algorithms and their settings gain, in simulated runs on two tasks and two model sizes."""
