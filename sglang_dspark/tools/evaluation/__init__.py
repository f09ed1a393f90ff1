"""Rounds of a running server, and what they say of a drafter: DeepSpec's accept-length protocol, calibration."""
