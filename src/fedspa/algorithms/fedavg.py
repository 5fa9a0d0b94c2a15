"""FedAvg (McMahan et al. 2017): τ plain local steps, the server averages. Nothing is clipped, noised or cut.

It is Fed-SPA's round with all coordinates active and no plan, so it shares its code. Batches are drawn as the config's
`privacy.sampling` says, and equation (2) of the paper's Section 3.2 holds: θ moves by the uniform mean of the updates.
"""

from fedspa.algorithms.base import Algorithm
from fedspa.algorithms.fedspa import respond

FEDAVG = Algorithm("fedavg", None, sparse=False, server="average", respond=respond)
