"""How fast, and with how much memory, on a CPU."""
