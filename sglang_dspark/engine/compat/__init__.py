"""What differs between SGLang's releases, one module per concern, each chosen by what the installed SGLang has.

Everything else in `engine` is one text for all of them. A release that moves something is answered here, by a test for
the thing itself: numbers of releases appear in `engine.support` alone.
"""
