"""Tools for users of a cluster: what HDET would cost there, and whether it can run."""
