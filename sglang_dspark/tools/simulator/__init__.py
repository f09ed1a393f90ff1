"""What a server would do, without one: the policies of the server against measured step times and acceptance."""
