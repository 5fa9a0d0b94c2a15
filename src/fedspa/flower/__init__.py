"""The same federation on Flower (extra `flower`): agents apart from the server and from each other.

The server's app and the client's app drive the objects that the simulator drives; nothing of the algorithm is written
here. docs/deployment.md tells how to run it.
"""
