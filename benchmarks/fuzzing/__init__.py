"""Requests that nobody means well with, and what becomes of a server's other users."""
