"""What the people need who run a site or the server: their folder, its keys, starting it, and how it is doing.

A folder holds all that belongs to a site or to the server, so that it can be checked, mounted, backed up and moved as
one. Nothing here imports torch or Flower before it must: a health check is asked for every minute.
"""
