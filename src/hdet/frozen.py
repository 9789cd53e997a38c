"""Imported last by the server that launched processes fork from: what modules have made by then is never garbage.

A collection in a fork, and a search for a model, would look at all of it, hundreds of thousands of objects, and copy
the memory of each.
"""

import gc

gc.collect()
gc.freeze()
