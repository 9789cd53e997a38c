"""What a round shows: losses, a probe's loss, a first-order slope."""
