"""DP-Fed, the paper's baseline: FedAvg whose local gradients carry Gaussian noise.

Fed-SPA's round with all d coordinates active, and the averaging server.
"""

from fedspa.algorithms.base import Algorithm
from fedspa.algorithms.fedspa import respond

DP_FED = Algorithm("dp-fed", private=True, sparse=False, server="average", respond=respond)
