"""What a model costs, in closed form. May import: errors, config, layers, models, families, checkpoint."""
