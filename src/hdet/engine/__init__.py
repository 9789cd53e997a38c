"""What happens when: the round loop, and how replicas come together. Private: it may change in any release."""

__all__: list[str] = []
