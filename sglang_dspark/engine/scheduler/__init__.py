"""The scheduler process: its batches, requests and results."""
