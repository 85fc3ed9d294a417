"""Samples kept in memory."""
