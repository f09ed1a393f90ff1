"""Requests of every kind for :mod:`fuzz_requests`: a tokenizer that is hard to serve, bodies, and users."""
