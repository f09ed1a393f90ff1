"""Sampling parameters, random numbers and the distributions that tokens are drawn from."""
