"""Trains drafters: texts of the target, the loss, the loop on accelerate, and accept lengths without a server."""
