"""What may move with the next release of SGLang: probed by the thing itself, and refused by name where it is gone.

Numbers of releases appear in `engine.support` alone.
"""
