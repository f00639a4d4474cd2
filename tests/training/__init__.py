"""Training as laws: what a recipe says, what tasks make of data, what losses and optimizers compute, how runs are resumed."""
