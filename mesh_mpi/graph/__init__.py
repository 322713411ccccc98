"""The graph: operations on global tensors, without a word about ranks.

Invariant: nothing in this package knows a single operation; ``ops/`` registers them.
"""
