"""Figures of a sweep. Every function draws one from the rows of ``serving.results.read_sweep`` and measures nothing."""
