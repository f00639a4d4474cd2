"""Weights in fewer bits: modules that are swapped into a finished model from outside, so that no layer has a branch for them.

integer.py        int8 and int4 weights for running a model
int4_rounding.py  the search for scales, minimums and values of int4 weights, also for known inputs (GPTQ)
calibration.py    the inputs of each product, on a few texts, and the norms that they come from
float8.py         fp8 products for training on a GPU
model_weights.py  the type, device and number of a model's weights, packed or not

May import: errors, config, kernels, layers, models.
"""
