"""Who the replicas are, and every collective among them. Private: it may change in any release."""

__all__: list[str] = []
