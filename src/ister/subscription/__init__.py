"""Subscriptions: which message goes to whom, what has been acknowledged, and where that is kept."""
