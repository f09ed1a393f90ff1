"""Commands and libraries for drafters and measurements; nothing here runs in a server."""
