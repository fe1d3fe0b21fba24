"""Layers that the models share: plain functions on arrays, and small Linen modules that hold parameters.

One alphabet of axes in every shape of this package:

    B batch    T target positions (the window)    S source positions (memory + window)    K predicted positions
    D model width    H heads    C channels of one head    F feed-forward width    V vocabulary    L layers    M memory
"""
