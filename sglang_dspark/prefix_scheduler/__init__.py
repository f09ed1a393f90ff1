"""Which drafts to verify: pure decision code, free of any serving engine and of any device."""
