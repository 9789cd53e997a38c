"""A tool for users of a cluster: whether HDET can run there, and what it costs."""
