"""The parts of a Transformer, each alone in a file, built from plain arguments; none knows a config or a model.

The legend of every shape in this library:

    B  batch                T  query length         S  key length
    H  heads                K  key/value heads      E  head width
    D  model width          F  feed-forward width   V  vocabulary
    P  patches              C  classes

May import: errors, limits, and the door of kernels.
"""
