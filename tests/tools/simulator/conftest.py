"""The simulator's tests share the tables made of formulas with those of the scheduler."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "scheduling"))
