"""Simulate a server: its own policies against measured step times and acceptance."""
