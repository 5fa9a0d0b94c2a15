"""The records: two half moons. The agents share the first part; the server evaluates on the second."""

from sklearn.datasets import make_moons


def moons():
    """(x_train, y_train, x_test, y_test), as arrays or tensors."""
    x, y = make_moons(5000, noise=0.2, random_state=0)
    return x[:4000], y[:4000], x[4000:], y[4000:]
