"""Decode steps: what decides, runs and records them."""
