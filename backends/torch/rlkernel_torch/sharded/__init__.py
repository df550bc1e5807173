"""Operators on data that is split over the ranks of a process group, in the arithmetic of the reference.

Not implementations that a policy chooses: what they give is defined by what the reference gives for the joined data.
"""
