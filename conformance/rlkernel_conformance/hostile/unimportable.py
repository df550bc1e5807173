"""The module of a backend that cannot be imported."""

raise RuntimeError("this module does not want to be imported")
