"""Counters of what speculation did, kept on the host."""
