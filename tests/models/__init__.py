"""The three shapes as laws: what must hold for every family, and for every config that hypothesis can think of."""
