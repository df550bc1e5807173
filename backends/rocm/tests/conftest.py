"""The toy kernels lie beside the tests of the simulator."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "simulator" / "tests"))
