"""The toy kernels lie beside the tests, which compile them and need no GPU."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
