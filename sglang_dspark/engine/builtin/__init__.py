"""Our schedule on SGLang's own DSPARK: which drafts of a step are verified, and whether any are drafted at all."""
