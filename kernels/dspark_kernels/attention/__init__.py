"""Attention of a few rows over paged K/V, and what writes these."""
