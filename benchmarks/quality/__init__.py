"""How good is what a model learns: scores on test sets, losses over steps. Each is run by itself."""
