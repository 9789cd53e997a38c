"""Adapters, one file for each framework; import the one you need. The rest of the package imports none of them."""
