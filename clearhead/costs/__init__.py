"""What a model costs: parameters, FLOPs and memory in closed form, and measured.

forecast.py     cost: the forecast of a call, a training step or a generated token
parameters.py   parameters and weight bytes
flops.py        floating-point operations
activations.py  what training keeps for the backward pass
temporaries.py  the widest moment of a call without gradients
capacity.py     the largest batch or length that fits, the number of devices
units.py        "80GB", "400T", and back
hardware.py     peak FLOP/s of this machine
measurement.py  the same numbers, measured
diagram.py      draw: a model drawn from its config, with its figures on each part; text_diagram.py draws it in letters
model_parts.py  the parts that these show; pattern_picture.py is a sparse pattern in them
geometry.py     how many nearly orthogonal directions fit into a width

Only hardware.py, measurement.py, geometry.embedding_angles and what draws a model load torch.
May import: errors, config, kernels, layers, models, quantization, families, checkpoint.
"""

from clearhead.costs.diagram import draw
from clearhead.costs.forecast import Cost, cost

__all__ = ["Cost", "cost", "draw"]
