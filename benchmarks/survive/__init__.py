"""What a training loses when machines are lost: laconic, torchft, and restarts from checkpoints."""
