"""What may move with the next release of SGLang. Where a move would go unnoticed, the thing itself is probed.

Numbers of releases appear in `engine.support` alone.
"""
