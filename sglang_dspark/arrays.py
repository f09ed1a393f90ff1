"""The array type of everything that counts, plans or calibrates on the host."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
