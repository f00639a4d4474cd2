"""What a model costs, in closed form: parameters, operations, memory, what fits (none of these loads torch); how many directions
its width holds; and what this machine can do, measured.

May import: errors, config, layers, models, families, checkpoint.
"""

from clearhead.costs.forecast import Cost, cost

__all__ = ["Cost", "cost"]
