"""Run decode steps, eagerly or as CUDA graphs."""
