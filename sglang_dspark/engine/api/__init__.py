"""The process that tokenizes requests and serves HTTP."""
