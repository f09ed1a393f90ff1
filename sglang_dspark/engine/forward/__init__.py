"""The target's forward passes: verification, its attention and its CUDA graphs."""
