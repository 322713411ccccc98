"""What one rank holds and does: placements, values, instructions and the builder that emits them.

Invariant: nothing here holds a rank number; positions are ``coordinate(axis) * block``.
"""
