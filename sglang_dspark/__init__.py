"""SGLang plugin for DSPARK speculative decoding.

This module stays free of imports: SGLang loads plugins in every one of its processes, and most of them need neither
torch nor the worker.
"""

__version__ = "0.3.0"
