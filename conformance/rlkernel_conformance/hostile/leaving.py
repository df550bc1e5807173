"""The module of a backend that ends the process when it is imported."""

import os

os._exit(0)
