"""What runs a decode step: launches one by one, or CUDA graphs."""
