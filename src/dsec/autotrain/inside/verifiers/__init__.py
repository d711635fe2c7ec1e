"""What an environment package needs of verifiers, for sandboxes in which the real one (570 MB) is not installed."""

__version__ = "0.4.0"
