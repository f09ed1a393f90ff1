"""Traces of a running server, and the calibration fitted to them."""
