"""Looking inside a model while it runs. May import: errors, config, layers, models, families, checkpoint."""

from clearhead.inside.probe import Seen, probe

__all__ = ["Seen", "probe"]
