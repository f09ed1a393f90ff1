"""Can this machine serve this pair of models with DSPARK, and if not, why?

Every check yields :class:`~sglang_dspark.tools.doctor.finding.Finding` objects, which the command line prints. If
SGLang is missing or is another release, a check says what it could not look at. Pairs get the checks that a start makes
(:mod:`sglang_dspark.engine.launch.checks`).
"""
