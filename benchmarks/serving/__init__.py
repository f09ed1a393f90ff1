"""Parts of the serving benchmarks: what is served, how it is asked, what is measured, and where it was measured."""
