"""Can this machine serve this pair of models with DSPARK, and if not, why?

Every check yields :class:`~sglang_dspark.doctor.finding.Finding` objects; `sglang_dspark.cli.doctor` prints them. Each
has to work where SGLang is missing or another release, and then says what it could not look at.
"""
