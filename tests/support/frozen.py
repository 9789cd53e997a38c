"""Imported last by the server that the processes of tests fork from: what is there by then is garbage's no more.

A collection, and a search for a model, would look at every object of every module imported, hundreds of thousands, and
in a fork copy the memory of each.
"""

import gc

gc.collect()
gc.freeze()
