"""Kernels in C: how they are compiled, loaded and chosen. What they compute is said in `ops`,
and of the search for a plan in `control.adaptive.allocation`.

`native/` holds plain C, compiled by `build` into one shared library when the package is installed
(again when its files change, in a checkout) and loaded by `library`. Without a compiler
everything runs on PyTorch's operations. For integer weights on a GPU there is Triton
(`triton.linear`), and for whole steps there (`triton.launches`).
"""
