"""What a model costs, in closed form: parameters, operations, memory (none of these loads torch); and what this machine can do.

May import: errors, config, layers, models, families, checkpoint.
"""

from clearhead.costs.forecast import Cost, cost

__all__ = ["Cost", "cost"]
