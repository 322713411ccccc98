"""Training: steps, their data order, their figures.

Invariant: what a step computes depends on the configuration, the seed and the step's number, and on no mesh.
"""
