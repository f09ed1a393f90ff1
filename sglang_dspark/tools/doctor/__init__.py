"""Can this machine serve this pair of models with DSPARK, and if not, why?

Every check yields :class:`~sglang_dspark.tools.doctor.finding.Finding` objects, which the command line prints. Each
check works where SGLang is missing or is another release, and then says what it could not look at.
"""
