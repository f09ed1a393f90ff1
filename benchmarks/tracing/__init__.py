"""What a profiler's trace of a server says about its decode steps. Nothing here runs a model."""
