"""Sampling parameters, random numbers and the laws that tokens are drawn from."""
