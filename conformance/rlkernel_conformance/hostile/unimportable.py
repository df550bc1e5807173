"""The module of a backend that cannot be imported."""

raise RuntimeError("this module cannot be imported")
