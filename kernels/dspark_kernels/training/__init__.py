"""Losses of drafter training."""
