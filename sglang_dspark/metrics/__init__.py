"""Counters of what speculation did, kept on the host, and all that is reported of them."""
