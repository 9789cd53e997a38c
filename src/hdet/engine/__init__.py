"""What happens when: the round loop, and where the weights are. Private: it may change in any release."""

__all__: list[str] = []
