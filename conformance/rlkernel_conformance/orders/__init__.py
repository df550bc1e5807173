"""Certificates of the order in which an operator's sums are taken: what is asked, of which calls, and what is equal.

A backend derives the hashes from compiled code (`READERS`); nothing here knows how.
"""
