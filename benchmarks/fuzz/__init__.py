"""Requests of every kind for :mod:`fuzz_requests`: bodies, and users."""
